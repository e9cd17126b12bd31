"""`predict` as text: how many rows got a prediction, and why the others did not."""

from __future__ import annotations

from collections import Counter

from trainledger.report.document import BLANK, Column, Document, Table, Text, left, table
from trainledger.report.words import Answer, whole

REASONS = 15


def document(answer: Answer) -> Document:
    """Counts by status, then the reasons; every row is in the JSON."""
    rows = answer["rows"]
    counts = Counter(row["status"] for row in rows)
    summary = ", ".join(f"{whole(counts[status])} {status}" for status in sorted(counts))
    return [
        Text(f"{whole(len(rows))} rows: {summary}", "answer"),
        *reasons(rows, {"unsupported", "incomplete"}),
        *ignored(answer),
    ]


def reasons(rows: list[Answer], statuses: set[str]) -> Document:
    """The commonest reasons of rows with these statuses."""
    counts = Counter((row["status"], row["reason"]) for row in rows if row["status"] in statuses)
    if not counts:
        return []
    more = len(counts) - REASONS
    cells = [[whole(count), status, reason] for (status, reason), count in counts.most_common(REASONS)]
    shown: Table = table([Column("rows"), left("status"), left("reason")], cells)
    return [BLANK, shown, *([Text(f"and {more} further reasons (--json has all)", "dim")] if more > 0 else [])]


def ignored(answer: Answer) -> Document:
    """Columns that nobody read."""
    columns = answer.get("ignored_columns", [])
    return [BLANK, Text(f"columns that are neither input nor outcome: {', '.join(columns)}", "warn")] if columns else []
