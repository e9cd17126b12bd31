"""Predicted peaks of memory against what runs measured, meter by meter.

A peak is compared in bytes: what is printed times what one printed GB is. A run that ran out of memory prints no peak;
it is a match where what is predicted exceeds what its card has to give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from trainledger.scoring.cells import Cells
from trainledger.scoring.exact_memory_score import score_figures
from trainledger.scoring.prediction import Bounds, Prediction, RunMemory
from trainledger.scoring.scored import Scored, by_source, errors_of, log_ratio, mean_of, source_of, spread
from trainledger.scoring.table import Row, Table, printed_number, whole_number
from trainledger.units import format_bytes

METERS = ("allocated", "reserved", "device")
UNKNOWN = "unknown"
STATUSES = ("scored", "match", "mismatch", "unmeasured", "unsupported", "incomplete")
GB = 10**9
UNITS = {"": 1 << 30, "2^30": 1 << 30, "gib": 1 << 30, "1e9": GB, "10^9": GB, "gb": GB, UNKNOWN: 1 << 30}
"""Bytes of one printed GB by the first word of `mem_unit_bytes`; one that is not known is taken for 2^30."""

TIER_C = "C"
"""The tier whose rows lack more than two inputs, or contradict themselves: scored apart."""


def score_memory(table: Table, said: Sequence[Prediction]) -> dict[str, Any]:
    """Every row with its grade, the sources, and all of them.

    A row is scored (its meter was measured and is predicted), a match or mismatch (it ran out of memory), unmeasured
    (it prints neither), or what `predict` said of it: unsupported, incomplete. A table of printed figures has grades of
    its own (exact_memory_score.py).
    """
    if table.kind == "exact":
        return score_figures(table, said)
    rows = [_scored(table, row, one) for row, one in zip(table.rows, said, strict=True)]
    grouped = by_source(rows)
    sources = {name: _summary(members) for name, members in grouped.items()}
    return {"rows": rows, "sources": sources, "overall": _overall(rows, grouped)}


def _scored(table: Table, row: Row, said: Prediction) -> Scored:
    cells = Cells(row.outcomes)
    meter = row.inputs.get("meter", "")
    out = cells.words("oom") in ("1", "true", "yes")
    measured = None if out else _measured_bytes(cells)
    status, reason, predicted = said.status, said.reason, None
    if said.memory is not None:
        status, reason, predicted = _grade(said.memory, row, meter, measured, out=out)
    graded = status == "scored"
    return Scored(
        id=row.id,
        source=source_of(table, row),
        tier=row.inputs.get("tier", ""),
        meter=meter,
        measured=float(measured) if measured is not None else None,
        predicted=float(predicted) if predicted is not None else None,
        log_ratio=log_ratio(Fraction(predicted), measured) if graded and predicted is not None else None,
        status=status,
        reason=reason,
    )


def _measured_bytes(cells: Cells) -> Fraction | None:
    """The printed peak in bytes; None where none is printed, or its unit is no unit."""
    printed = printed_number(cells.text("peak_mem_gib"))
    unit = UNITS.get(cells.words("mem_unit_bytes").partition(" ")[0])
    return Fraction(printed) * unit if printed is not None and unit is not None and printed > 0 else None


def _grade(
    memory: RunMemory, row: Row, meter: str, measured: Fraction | None, *, out: bool
) -> tuple[str, str, int | None]:
    """(status, reason, predicted bytes) of a predicted row."""
    if out:
        return _out_of_memory(memory, row)
    if measured is None:
        return "unmeasured", "the row prints no peak memory that can be read", None
    bounds = memory.meters.get(meter) if meter in METERS else _nearest(memory)
    if bounds is None:
        have = ", ".join(memory.meters)
        return "unsupported", f"no account of the {meter} meter; there is one of {have}", None
    return "scored", "", bounds.estimate


def _nearest(memory: RunMemory) -> Bounds | None:
    """The reading that stands for a meter that a source does not name: the middle one that there is."""
    return next((memory.meters[name] for name in ("reserved", "allocated", "device") if name in memory.meters), None)


def _out_of_memory(memory: RunMemory, row: Row) -> tuple[str, str, int | None]:
    """Whether what is predicted exceeds the card: the device meter, or the largest that there is."""
    usable = memory.usable_bytes
    if usable is None:
        stated = whole_number(row.inputs.get("gpu_mem_gb", ""), 1)
        if stated is None:
            return "incomplete", "gpu and gpu_mem_gb name no card: whether memory runs out depends on it", None
        usable = stated * GB
    most = max(bounds.estimate for bounds in memory.meters.values())
    shown = f"{format_bytes(most)} predicted, {format_bytes(usable)} usable"
    if most > usable:
        return "match", f"ran out of memory, and {shown}", most
    return "mismatch", f"ran out of memory, but {shown}", most


def _settled(row: Scored) -> bool:
    """Whether a row counts in the mean over sources: a complete configuration, and a meter that is named."""
    return row.tier != TIER_C and row.meter in METERS


def _counts(rows: Sequence[Scored]) -> dict[str, int]:
    return {"rows": len(rows), **{status: sum(row.status == status for row in rows) for status in STATUSES}}


def _summary(rows: Sequence[Scored]) -> dict[str, Any]:
    """Counts by status; the errors of complete rows, by meter too, then those of tier C and of meters not named."""
    settled = [row for row in rows if _settled(row)]
    named = [*METERS, UNKNOWN]
    meters = {name: _errors([row for row in rows if (row.meter or UNKNOWN) == name]) for name in named}
    return {
        **_counts(rows),
        **_errors(settled),
        "meters": {name: summary for name, summary in meters.items() if summary["scored_rows"]},
        "tier_c": _errors([row for row in rows if row.tier == TIER_C and row.meter in METERS]),
        "unknown_meter": _errors([row for row in rows if row.meter not in METERS]),
    }


def _errors(rows: Sequence[Scored]) -> dict[str, Any]:
    """How far off some rows are; and over distinct measured values, each of which counts once by its median error."""
    scored = [row for row in rows if row.log_ratio is not None]
    values: dict[tuple[str, float | None], list[Scored]] = {}
    for row in scored:
        values.setdefault((row.meter, row.measured), []).append(row)
    medians = [float(np.median(errors_of(members))) for members in values.values()]
    return {
        "scored_rows": len(scored),
        **spread(errors_of(scored)),
        "distinct": {"values": len(values), **spread(medians)},
    }


def _overall(rows: Sequence[Scored], grouped: dict[str, list[Scored]]) -> dict[str, Any]:
    """Counts over all rows, the mean over sources of complete rows, and apart from them tier C and unnamed meters."""
    out = [row for row in rows if row.status in ("match", "mismatch")]
    return {
        **_counts(rows),
        **_mean(grouped, _settled),
        "tier_c": _mean(grouped, lambda row: row.tier == TIER_C and row.meter in METERS),
        "unknown_meter": _mean(grouped, lambda row: row.meter not in METERS),
        "out_of_memory": {"rows": len(out), "match": sum(row.status == "match" for row in out)},
        "mismatch_ids": [row.id for row in out if row.status == "mismatch"],
    }


def _mean(grouped: dict[str, list[Scored]], belongs: Callable[[Scored], bool]) -> dict[str, Any]:
    """The mean over the sources that have such rows, over rows and over distinct measured values."""
    chosen = [_errors([row for row in members if belongs(row)]) for members in grouped.values()]
    chosen = [summary for summary in chosen if summary["scored_rows"]]
    return {
        "scored_sources": len(chosen),
        "scored_rows": sum(summary["scored_rows"] for summary in chosen),
        **mean_of(chosen),
        "distinct": mean_of([summary["distinct"] for summary in chosen]),
    }
