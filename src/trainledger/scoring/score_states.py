"""Predicted states against the figures that rows print, to the last digit."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from trainledger.errors import BadInput
from trainledger.scoring.prediction import Prediction
from trainledger.scoring.printed import cut_to, half_unit, is_formula, is_plausible, rounds_to
from trainledger.scoring.scored import Scored, by_source, errors_of, log_ratio, mean_of, source_of, spread
from trainledger.scoring.table import Row, Table, printed_number

GRADES = ("match", "source_truncated", "mismatch")
STATUSES = (*GRADES, "unsupported", "incomplete")
NOT_OF_STATES = "a figure of memory that is not of states: --what memory grades it"
NO_STATES = "a measured run prints its step time and its memory at the peak, never its states alone"


def score_states(table: Table, said: Sequence[Prediction]) -> dict[str, Any]:
    """Every row with its grade, the sources, and all of them.

    A row is a match (the print shows the prediction), source_truncated (the print is the prediction with its further
    digits dropped), a mismatch, or what `predict` said of it: unsupported, incomplete.
    """
    rows = [_scored(table, row, one) for row, one in zip(table.rows, said, strict=True)]
    sources = {name: _summary(members) for name, members in by_source(rows).items()}
    return {"rows": rows, "sources": sources, "overall": _overall(rows, sources)}


def _scored(table: Table, row: Row, said: Prediction) -> Scored:
    measured, unread = _measured(table, row)
    status, reason = said.status, said.reason
    value = said.states.value if said.states else None
    if said.memory is not None or said.figure is not None:
        status, reason = "unsupported", NO_STATES if said.figure is None else NOT_OF_STATES
    elif value is not None:
        status, reason = ("incomplete", unread) if measured is None else _grade(value, measured)
    graded = value is not None and measured is not None
    return Scored(
        id=row.id,
        source=source_of(table, row),
        tier=row.inputs.get("tier", ""),
        meter=row.inputs.get("meter", ""),
        measured=float(measured) if measured is not None else None,
        predicted=float(value) if value is not None else None,
        log_ratio=log_ratio(value, measured) if graded else None,
        status=status,
        reason=reason,
    )


def _measured(table: Table, row: Row) -> tuple[Decimal | None, str]:
    """The figure to compare with, or why there is none: what is printed, or what its formula was worked out to be."""
    if table.kind != "exact":
        return None, ""
    text, column = row.outcomes.get("value_published", ""), "value_published"
    value = printed_number(text)
    if value is None:
        value, worked_out = _recomputed(table, row), row.outcomes.get("value_recomputed", "")
        if not is_formula(text):
            shown = f"is {text!r}" if text else "is blank"
            return (
                None,
                f"value_published {shown}, neither one number nor a formula such as 4 + 16/d: write what is printed",
            )
        if value is None:
            return None, f"value_published is {text!r} and value_recomputed is blank: write what the formula comes to"
        text, column = worked_out, "value_recomputed"
    if not is_plausible(value):
        return None, f"{column} is {text[:24]!r}, with digits beyond 1e30 or below 1e-30: write the figure as printed"
    return value, ""


def _recomputed(table: Table, row: Row) -> Decimal | None:
    recomputed = row.outcomes.get("value_recomputed", "")
    value = printed_number(recomputed)
    if recomputed and value is None:
        raise BadInput(
            f"{table.where}, line {row.line}, column value_recomputed: {recomputed!r} is not a number; "
            "write the figure, or leave it blank"
        )
    return value


def _grade(value: Fraction, measured: Decimal) -> tuple[str, str]:
    """(status, reason) of a predicted row that prints a figure."""
    if rounds_to(value, measured):
        return "match", ""
    if cut_to(value, measured):
        return "source_truncated", f"{float(value):.12g} is printed as {measured}: its further digits were dropped"
    apart, allowed = float(abs(value - Fraction(measured))), float(half_unit(measured))
    return "mismatch", (
        f"{float(value):.12g} predicted, {measured} printed: {apart:.6g} apart, "
        f"and half a unit of the last digit is {allowed:g}"
    )


def _summary(rows: Sequence[Scored]) -> dict[str, Any]:
    """Counts by status, and how far off the graded rows are."""
    return {
        "rows": len(rows),
        "scored": sum(row.status in GRADES for row in rows),
        **{status: sum(row.status == status for row in rows) for status in STATUSES},
        **spread(errors_of(rows)),
    }


def _overall(rows: Sequence[Scored], sources: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Counts over all rows, which ones are off, and the mean over sources."""
    return {
        **_summary(rows),
        **mean_of(sources.values()),
        "source_truncated_ids": [row.id for row in rows if row.status == "source_truncated"],
        "mismatch_ids": [row.id for row in rows if row.status == "mismatch"],
    }
