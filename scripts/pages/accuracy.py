"""The page of how far predictions are off, from the runs that ship with the package."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pages.hardware import table
from trainledger.facts.load import DATA
from trainledger.scoring.score import score_csv
from trainledger.units import format_bytes

RUNS = DATA / "measured" / "runs.csv"
FAR = 0.05
"""A row further off than this is listed with what was predicted."""

INTRO = """# Accuracy

Written by `python scripts/docs.py` from the published runs in `src/trainledger/data/measured/runs.csv`. The predictor
is handed the inputs of a row and nothing else; a test blanks and shuffles the outcomes and demands the same bytes. An
error is the natural logarithm of predicted over measured. To repeat it:

    trainledger score src/trainledger/data/measured/runs.csv --what memory

Some of these rows were looked at when engines were written down, so they are calibration, not proof: rows and whole
sources that nobody here has seen are what a prediction is worth.

## By source and meter

Rows of tier A and B: the configuration is complete, or one or two things are inferred. Values are distinct measured
peaks: a source that prints one peak for several rows counts it once.

"""

MEANS = """
## By meter

The mean over sources of their medians and 90th percentiles, so that no large source dominates; and the same with each
source left out in turn, the most and the least that the mean can be without one.

"""

APART = """
## Apart

Tier C (several inputs missing, or the source contradicts itself) and rows whose meter is not named.

"""

FURTHEST = """
## Further off than {far}

{count} rows of {rows}. Nothing is corrected for these.

"""

NOT_SCORED = """
## Not scored

"""

OUT = """
## Out of memory

{match} of {rows} runs that ran out of memory are predicted not to fit.
"""


def render() -> str:
    """The text of docs/accuracy.md."""
    answer = score_csv(RUNS, "memory")
    rows: list[Mapping[str, Any]] = answer["rows"]
    sources: Mapping[str, Mapping[str, Any]] = answer["sources"]
    out = answer["overall"]["out_of_memory"]
    far = sorted(_far(rows), key=lambda row: -abs(row["log_ratio"]))
    return "".join(
        (
            INTRO,
            table(_columns("source", "meter"), [line for name in sources for line in _source(name, rows)]),
            MEANS,
            table(("meter", "sources", "median", "90th percentile", "median without one"), list(_means(rows))),
            APART,
            table(_columns("source", "meter"), list(_apart(rows))),
            FURTHEST.format(far=_percent(FAR), count=len(far), rows=sum(_settled(row) for row in rows)),
            table(("row", "meter", "measured", "predicted", "error"), [_row(row) for row in far]),
            OUT.format(**out) if out["rows"] else "",
            NOT_SCORED,
            table(("rows", "status", "reason"), list(_unscored(rows))),
        )
    )


def _columns(*first: str) -> tuple[str, ...]:
    return (*first, "rows", "values", "median", "90th percentile", "worst")


def _settled(row: Mapping[str, Any]) -> bool:
    named = row["meter"] in ("allocated", "reserved", "device")
    return row["log_ratio"] is not None and row["tier"] != "C" and named


def _far(rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    return (row for row in rows if _settled(row) and abs(row["log_ratio"]) > FAR)


def _source(name: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    own = [row for row in rows if row["source"] == name and _settled(row)]
    for meter in dict.fromkeys(row["meter"] for row in own):
        yield (name, meter, *_spread([row for row in own if row["meter"] == meter]))


def _apart(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    graded = [row for row in rows if row["log_ratio"] is not None and not _settled(row)]
    for name, meter in dict.fromkeys((row["source"], row["meter"]) for row in graded):
        own = [row for row in graded if (row["source"], row["meter"]) == (name, meter)]
        yield (name, meter or "not named", *_spread(own))


def _errors(rows: Iterable[Mapping[str, Any]]) -> list[float]:
    return sorted(abs(row["log_ratio"]) for row in rows)


def _quantile(errors: list[float], share: float) -> float:
    """Between the two nearest, as numpy does by default."""
    place = (len(errors) - 1) * share
    low = int(place)
    high = min(low + 1, len(errors) - 1)
    return errors[low] + (errors[high] - errors[low]) * (place - low)


def _spread(rows: list[Mapping[str, Any]]) -> tuple[str, ...]:
    errors, values = _errors(rows), {row["measured"] for row in rows}
    shown = (_percent(_quantile(errors, 0.5)), _percent(_quantile(errors, 0.9)), _percent(errors[-1]))
    return (str(len(rows)), str(len(values)), *shown)


def _means(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    settled = [row for row in rows if _settled(row)]
    for meter in dict.fromkeys(row["meter"] for row in settled):
        of_meter = [row for row in settled if row["meter"] == meter]
        names = list(dict.fromkeys(row["source"] for row in of_meter))
        errors = [_errors(row for row in of_meter if row["source"] == name) for name in names]
        medians, tails = ([_quantile(one, share) for one in errors] for share in (0.5, 0.9))
        without = [_mean([*medians[:i], *medians[i + 1 :]]) for i in range(len(medians))] if len(medians) > 1 else []
        span = f"{_percent(min(without))} to {_percent(max(without))}" if without else "-"
        yield meter, str(len(names)), _percent(_mean(medians)), _percent(_mean(tails)), span


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    shown = (format_bytes(row["measured"]), format_bytes(row["predicted"]))
    return row["id"], row["meter"], *shown, f"{100 * row['log_ratio']:+.1f} %"


def _unscored(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    seen: dict[tuple[str, str], int] = {}
    for row in rows:
        if row["status"] in ("unsupported", "incomplete", "unmeasured"):
            key = (row["status"], row["reason"])
            seen[key] = seen.get(key, 0) + 1
    for (status, reason), count in sorted(seen.items(), key=lambda item: -item[1]):
        yield str(count), status, reason.replace("|", "/")


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
