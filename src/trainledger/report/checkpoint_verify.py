"""`checkpoint verify` as text: a row per checkpoint, and what is wrong with those that are damaged."""

from __future__ import annotations

from trainledger.report.document import Column, Document, Text, left, table
from trainledger.report.words import Answer
from trainledger.units import format_bytes


def document(answer: Answer) -> Document:
    """All, the newest first."""
    good = [one for one in answer["checkpoints"] if not one["why"]]
    columns = [left("checkpoint"), Column("step"), left("model"), left("precision"), left("optimizer"), Column("files")]
    rows = [
        [one["path"], str(one["step"]), one["model"], one["precision"], one["optimizer"], format_bytes(one["bytes"])]
        for one in good
    ]
    damaged = [Text(one["why"], "bad") for one in answer["checkpoints"] if one["why"]]
    said = Text(f"{len(good)} of {len(answer['checkpoints'])} are as they were written", "bad" if damaged else "good")
    return [said, *([table(columns, rows)] if rows else []), *damaged]
