"""Printed figures of memory other than states, graded: formulas to their last digit, readings by how far off they are.

Of a formula the figure is what it comes to (value_recomputed), because a paper may print 15.2 for twice 7.64.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from trainledger.scoring.prediction import Prediction
from trainledger.scoring.printed import cut_to, is_plausible, rounds_to
from trainledger.scoring.scored import Scored, by_source, errors_of, log_ratio, mean_of, source_of, spread
from trainledger.scoring.table import Row, Table, printed_number

GRADES = ("match", "source_truncated", "mismatch", "measured")
STATUSES = (*GRADES, "unsupported", "incomplete")
STATES = "a figure of states alone: --what states grades it"


def score_figures(table: Table, said: Sequence[Prediction]) -> dict[str, Any]:
    """Every row with its grade, the sources, and all of them.

    A row is a match, source_truncated or a mismatch as under --what states, measured (a reading, told by its error), or
    what `predict` said of it: unsupported, incomplete. Rows of states are unsupported here.
    """
    rows = [_scored(table, row, one) for row, one in zip(table.rows, said, strict=True)]
    sources = {name: _summary(members) for name, members in by_source(rows).items()}
    off = {status: [row.id for row in rows if row.status == status] for status in ("source_truncated", "mismatch")}
    overall = {**_summary(rows), **mean_of(sources.values()), **{f"{name}_ids": ids for name, ids in off.items()}}
    return {"rows": rows, "sources": sources, "overall": overall}


def _scored(table: Table, row: Row, said: Prediction) -> Scored:
    status, reason, value, printed = said.status, said.reason, None, None
    if said.figure is None:
        status, reason = ("unsupported", STATES) if said.states is not None else (status, reason)
    else:
        value, printed = said.figure.value, _printed(row, measured=said.figure.measured)
        if printed is None:
            status, reason = "incomplete", "no column of the row has one number to compare with"
        elif said.figure.measured:
            status, reason = "measured", ""
        elif rounds_to(value, printed):
            status, reason = "match", ""
        elif cut_to(value, printed):
            status, reason = "source_truncated", f"{float(value):.12g} is printed as {printed}"
        else:
            status, reason = "mismatch", f"{float(value):.12g} predicted, {printed} worked out"
    return Scored(
        id=row.id,
        source=source_of(table, row),
        tier=row.inputs.get("tier", ""),
        meter=row.inputs.get("meter", ""),
        measured=float(printed) if printed is not None else None,
        predicted=float(value) if value is not None else None,
        log_ratio=log_ratio(value, printed),
        status=status,
        reason=reason,
    )


def _printed(row: Row, *, measured: bool) -> Decimal | None:
    """A reading as it is printed; of a formula what it comes to, else what is printed."""
    columns = ("value_published",) if measured else ("value_recomputed", "value_published")
    for column in columns:
        value = printed_number(row.outcomes.get(column, ""))
        if value is not None and is_plausible(value):
            return value
    return None


def _summary(rows: Sequence[Scored]) -> dict[str, Any]:
    """Counts by status, and how far off the graded rows are."""
    return {
        "rows": len(rows),
        "scored": sum(row.status in GRADES for row in rows),
        **{status: sum(row.status == status for row in rows) for status in STATUSES},
        **spread(errors_of(rows)),
    }
