"""`baseline history` as text: a row per record and number of ranks."""

from __future__ import annotations

from trainledger.report.baseline_run import seconds, share
from trainledger.report.document import Column, Document, Text, left, table
from trainledger.report.words import Answer, whole
from trainledger.units import format_bytes


def document(answer: Answer) -> Document:
    """All records, the oldest first."""
    records = answer["records"]
    if not records:
        return [Text(f"{answer['book']} has no record; `trainledger baseline run` makes one")]
    columns = [
        *(Column("number"), left("name"), left("made (UTC)"), left("layout"), left("scaling"), Column("ranks")),
        *map(Column, ("tokens/s", "step, median", "efficiency", "peak")),
        left("ledger"),
    ]
    rows = [_row(record, index, rung) for record in records for index, rung in enumerate(record["rungs"])]
    return [Text(answer["book"], "answer"), table(columns, rows)]


def _row(record: Answer, index: int, rung: Answer) -> list[str]:
    """What is of the record is said in its first row."""
    head = [
        str(record["number"]),
        record["name"],
        record["made_at"].partition("+")[0],
        f"{record['model']}: {record['layout']}",
        record["scaling"],
    ]
    return [
        *(head if index == 0 else [""] * len(head)),
        whole(rung["ranks"]),
        f"{rung['tokens_per_s']:,.0f}",
        seconds(rung["step_s"]),
        share(rung["efficiency"]),
        format_bytes(rung["peak_bytes"]),
        "proven" if rung["proven"] else "differs",
    ]
