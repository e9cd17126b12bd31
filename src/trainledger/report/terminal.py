"""The same lines in colour. rich is imported here and in `progress` alone, and only when a terminal is there."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console
from rich.text import Text as RichText

from trainledger.report.document import Document, Style
from trainledger.report.plain import lines

COLOURS: dict[Style, str] = {
    "": "",
    "answer": "bold",
    "good": "green",
    "bad": "red",
    "warn": "yellow",
    "dim": "dim",
    "heading": "bold cyan",
    "title": "bold underline",
}


def draw(document: Document, stream: TextIO) -> None:
    """Draw on a terminal; colours follow NO_COLOR and TERM, as rich does, and long lines are the terminal's to wrap."""
    console = Console(file=stream, highlight=False, soft_wrap=True)
    for line in lines(document):
        console.print(RichText(line.text, style=COLOURS[line.style]), soft_wrap=True)
