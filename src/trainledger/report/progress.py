"""How far a run is, on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from trainledger.report.plain import spelled


@contextmanager
def progress(stream: TextIO) -> Generator[Callable[[int, int, str], None]]:
    """A line with how many of how many are done, and of what; it goes when all is done."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def heard(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total, description=spelled(text))

        yield heard
