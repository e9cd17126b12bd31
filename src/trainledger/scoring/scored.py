"""What every way of scoring shares: one row's grade, the source it counts under, and how errors are summed up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from decimal import Decimal
from fractions import Fraction

import msgspec
import numpy as np

from trainledger.scoring.table import Row, Table

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


def source_of(table: Table, row: Row) -> str:
    """What a row counts under: the prefix of its id for a run, for a printed figure the place it is printed."""
    return row.id.partition("-")[0] if table.kind == "runs" else row.inputs.get("source", "")


def by_source(rows: Iterable[Scored]) -> dict[str, list[Scored]]:
    """The rows of each source, in the order in which sources first stand."""
    grouped: dict[str, list[Scored]] = {}
    for row in rows:
        grouped.setdefault(row.source, []).append(row)
    return grouped


def log_ratio(value: Fraction | None, measured: Decimal | Fraction | None) -> float | None:
    """Natural logarithm of predicted over measured; None where one is not above zero."""
    if value is None or measured is None or value <= 0 or measured <= 0:
        return None
    return math.log(value / Fraction(measured))


def errors_of(rows: Iterable[Scored]) -> list[float]:
    """|ln ratio| of every row that has one."""
    return [abs(row.log_ratio) for row in rows if row.log_ratio is not None]


def spread(errors: Sequence[float]) -> dict[str, float | None]:
    """The median and the 90th percentile of some |ln ratio|, null where there is none."""
    return {
        "median_abs_log_ratio": float(np.median(errors)) if errors else None,
        "p90_abs_log_ratio": float(np.quantile(errors, SCORED_QUANTILE)) if errors else None,
    }


def mean_of(summaries: Iterable[dict[str, float | None]]) -> dict[str, float | None]:
    """The unweighted mean over sources of their medians and percentiles, so that no large source dominates."""
    known = list(summaries)
    means: dict[str, float | None] = {}
    for key in ("median_abs_log_ratio", "p90_abs_log_ratio"):
        values = [value for summary in known if (value := summary[key]) is not None]
        means[key] = float(np.mean(values)) if values else None
    return means
