"""`diff` as text."""

from __future__ import annotations

from trainledger.report.document import BLANK, Column, Document, Style, Text, left, table
from trainledger.report.words import Answer
from trainledger.units import format_bytes, format_gb

SHOWN = 40


def document(answer: Answer) -> Document:
    """The totals, then the lines that moved, largest first."""
    lines = answer["lines"]
    columns = [left(""), Column("A"), Column("B"), Column("change")]
    more = len(lines) - SHOWN
    return [
        Text(f"{len(lines)} lines moved, {answer['same']} are the same", "answer"),
        Text(f"A: {answer['a']}"),
        Text(f"B: {answer['b']}"),
        table(columns, [_cells(line) for line in answer["totals"]], [_style(line) for line in answer["totals"]]),
        BLANK,
        *(
            [table([left("line"), *columns[1:]], [_cells(line) for line in lines[:SHOWN]])]
            if lines
            else [Text("no line moved", "good")]
        ),
        *([Text(f"and {more} smaller ones (--json has all)", "dim")] if more > 0 else []),
    ]


def _cells(line: Answer) -> tuple[str, str, str, str]:
    show = format_gb if line["id"].startswith(("moved/", "sent")) else format_bytes
    sign = "+" if line["delta"] > 0 else ""
    return line["id"], show(line["a"]), show(line["b"]), f"{sign}{show(line['delta'])}"


def _style(line: Answer) -> Style:
    return "bad" if line["delta"] > 0 else "good" if line["delta"] < 0 else ""
