"""How far a proof is: a line per cell, and at a terminal a bar under them."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Protocol

from proofs.cells import Cell
from proofs.record import Result
from trainledger.runtime.progress import Progress


class Screen(Protocol):
    """Where a proof says how far it is."""

    def line(self, text: str) -> None:
        """Say one thing for good."""
        ...

    def cell(self, text: str) -> Progress:
        """Say what runs now; what it gives back is told how far that is."""
        ...


class Plain:
    """Lines, for a pipe or a file."""

    def line(self, text: str) -> None:
        """Print it at once."""
        print(text, flush=True)

    def cell(self, text: str) -> Progress:
        """Nothing: a line follows when the cell is done."""
        del text
        return lambda _done, _total, _text: None


@contextmanager
def screen(total: int) -> Generator[Screen]:
    """A bar at a terminal, lines elsewhere."""
    if not sys.stdout.isatty():
        yield Plain()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Bars(*columns, transient=True) as bar:
        task = bar.add_task("", total=total)

        class Terminal:
            started = 0

            def line(self, text: str) -> None:
                bar.console.print(text, markup=False, highlight=False)

            def cell(self, text: str) -> Progress:
                bar.update(task, description=text, completed=self.started)
                self.started += 1

                def heard(done: int, of: int, what: str) -> None:
                    bar.update(task, description=f"{text}: {what}" if done < of else text)

                return heard

        yield Terminal()


def expected_s(cell: Cell, known: Mapping[str, float], taken: Iterable[tuple[str, float]]) -> float | None:
    """Seconds that a cell should take: as long as before, or as those of its kind (kind, seconds) in this run."""
    if cell.id in known:
        return known[cell.id]
    alike = [seconds for kind, seconds in taken if kind == cell.kind]
    return sum(alike) / len(alike) if alike else None


def span(seconds: float) -> str:
    """A length of time.

    >>> span(42), span(170), span(7260)
    ('42 s', '3 min', '2 h 1 min')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def told(result: Result) -> str:
    """A cell in one line.

    >>> from proofs.prove import broken
    >>> cell = Cell(id="gpt2/dp2", kind="run", model="gpt2", flags={"dp": 2})
    >>> told(broken(cell, "", RuntimeError("rank 1 died")))
    'failed gpt2/dp2 in 0 s: RuntimeError: rank 1 died'
    """
    parts = [f"{result.verdict} {result.id} in {span(result.seconds)}"]
    if result.ranks:
        parts.append(f"{result.ranks} ranks, {result.equal + result.within:,} of {result.lines:,} lines as predicted")
    if result.gradient_error is not None:
        parts.append(f"gradients within {result.gradient_error:.1e}")
    said = ", ".join(parts)
    return f"{said}: {result.named[0]}" if result.named else said
