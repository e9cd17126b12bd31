"""Predictions graded against what the rows print, row by row, by source and over all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from trainledger.errors import BadInput, UnknownName
from trainledger.scoring.predict import predictions, with_ignored
from trainledger.scoring.printed import cut_to, half_unit, is_formula, is_plausible, rounds_to
from trainledger.scoring.states import Prediction
from trainledger.scoring.table import Row, Table, load_table, printed_number

GRADES = ("match", "source_truncated", "mismatch")
STATUSES = (*GRADES, "unsupported", "incomplete")
SCORED_QUANTILE = 0.9


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """One row's grade: a key of `score --json` per field, null where the row has no such figure."""

    id: str
    source: str
    tier: str
    meter: str
    measured: float | None
    predicted: float | None
    log_ratio: float | None
    status: str
    reason: str


def score_csv(path: str | Path, what: str) -> dict[str, Any]:
    """Every row of a table with its grade, in the file's order, then the sources, then all of them.

    {"rows": [{"id", "source", "tier", "meter", "measured", "predicted", "log_ratio", "status", "reason"}], "sources",
    "overall"}. A row is a match (the print shows the prediction), source_truncated (the print is the prediction with
    its further digits dropped), a mismatch, or what `predict` said of it: unsupported, incomplete. `what` is "states".
    """
    if what != "states":
        raise UnknownName("thing to score", what, ["states"], "write --what states")
    table = load_table(path)
    rows = [_scored(table, row, said) for row, said in zip(table.rows, predictions(table), strict=True)]
    by_source: dict[str, list[Scored]] = {}
    for row in rows:
        by_source.setdefault(row.source, []).append(row)
    sources = {name: _summary(members) for name, members in by_source.items()}
    response = {"rows": msgspec.to_builtins(rows), "sources": sources, "overall": _overall(rows, sources)}
    return with_ignored(table, response)


def source_of(table: Table, row: Row) -> str:
    """What a row counts under: the prefix of its id for a run, for a printed figure the place it is printed."""
    return row.id.partition("-")[0] if table.kind == "runs" else row.inputs.get("source", "")


def _scored(table: Table, row: Row, said: Prediction) -> Scored:
    measured, unread = _measured(table, row)
    status, reason = said.status, said.reason
    value = said.states.value if said.states else None
    if value is not None:
        status, reason = ("incomplete", unread) if measured is None else _grade(value, measured)
    graded = value is not None and measured is not None
    return Scored(
        id=row.id,
        source=source_of(table, row),
        tier=row.inputs.get("tier", ""),
        meter=row.inputs.get("meter", ""),
        measured=float(measured) if measured is not None else None,
        predicted=float(value) if value is not None else None,
        log_ratio=_log_ratio(value, measured) if graded else None,
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


def _log_ratio(value: Fraction | None, measured: Decimal | None) -> float | None:
    """Natural logarithm of predicted over measured; None where one is not above zero."""
    if value is None or measured is None or value <= 0 or measured <= 0:
        return None
    return math.log(value / Fraction(measured))


def _summary(rows: Sequence[Scored]) -> dict[str, Any]:
    """Counts by status, and how far off the graded rows are."""
    errors = [abs(row.log_ratio) for row in rows if row.log_ratio is not None]
    return {
        "rows": len(rows),
        "scored": sum(row.status in GRADES for row in rows),
        **{status: sum(row.status == status for row in rows) for status in STATUSES},
        "median_abs_log_ratio": float(np.median(errors)) if errors else None,
        "p90_abs_log_ratio": float(np.quantile(errors, SCORED_QUANTILE)) if errors else None,
    }


def _overall(rows: Sequence[Scored], sources: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Counts over all rows, which ones are off, and the unweighted mean over sources, so that none dominates."""
    counts = _summary(rows)
    for key in ("median_abs_log_ratio", "p90_abs_log_ratio"):
        known = [source[key] for source in sources.values() if source[key] is not None]
        counts[key] = float(np.mean(known)) if known else None
    return {
        **counts,
        "source_truncated_ids": [row.id for row in rows if row.status == "source_truncated"],
        "mismatch_ids": [row.id for row in rows if row.status == "mismatch"],
    }
