"""`score` as text: one row per source, none dropped."""

from __future__ import annotations

import math

from trainledger.report.document import BLANK, Column, Document, Style, Table, Text, left, table
from trainledger.report.predict import ignored, reasons
from trainledger.report.words import Answer, percent, whole
from trainledger.units import format_bytes

COUNTS = ("rows", "scored", "match", "source_truncated", "mismatch", "unsupported", "incomplete")
LEGEND = (
    "source: what stands before the number in a row's id; median and p90 are of |ln(predicted / measured)|",
    "values: a figure that several rows print once; tier C: much of the configuration inferred, in no other mean",
)
"""What the columns of the table by source are."""
FAR = 15
"""How many of the rows that are furthest off are shown."""


def document(answer: Answer) -> Document:
    """The grade over all, then by source, then what is off and what has no prediction."""
    return [*_body(answer), *reasons(answer["rows"], {"unsupported", "incomplete"}), *ignored(answer)]


def _body(answer: Answer) -> Document:
    """Which of the three kinds of grades it is."""
    if answer["what"] != "memory":
        return _states(answer)
    return _memory(answer) if "out_of_memory" in answer["overall"] else _figures(answer)


def _states(answer: Answer) -> Document:
    overall = answer["overall"]
    right = overall["match"] + overall["source_truncated"]
    return [
        Text(
            f"{whole(right)} of {whole(overall['scored'])} scored figures agree to their last printed digit"
            f" ({whole(overall['source_truncated'])} of them cut off by their source);"
            f" {whole(overall['rows'] - overall['scored'])} of {whole(overall['rows'])} rows have no score",
            "answer",
        ),
        BLANK,
        _sources(answer),
        *_mismatches(answer),
    ]


def _figures(answer: Answer) -> Document:
    """Printed figures of memory other than states, and readings among them."""
    overall = answer["overall"]
    right = overall["match"] + overall["source_truncated"]
    errors = [abs(row["log_ratio"]) for row in answer["rows"] if row["status"] == "measured"]
    read = f"; {whole(len(errors))} readings are met within {percent(max(errors))}" if errors else ""
    return [
        Text(
            f"{whole(right)} of {whole(right + overall['mismatch'])} figures of memory other than states agree to their"
            f" last digit{read}; {whole(overall['rows'] - overall['scored'])} of {whole(overall['rows'])} rows have no"
            " score",
            "answer",
        ),
        BLANK,
        _sources(answer, ("rows", "match", "source_truncated", "mismatch", "measured", "unsupported", "incomplete")),
        *_mismatches(answer),
    ]


def _sources(answer: Answer, counted: tuple[str, ...] = COUNTS) -> Table:
    named = [*answer["sources"].items(), ("all", answer["overall"])]
    cells = [
        [name, *(whole(counts[key]) for key in counted), _error(counts["median_abs_log_ratio"])]
        for name, counts in named
    ]
    styles: list[Style] = ["bad" if counts["mismatch"] else "" for _, counts in named]
    columns = [
        left("source"),
        *(Column(key.replace("source_", "").replace("_", " ")) for key in counted),
        Column("median |ln ratio|"),
    ]
    return table(columns, cells, styles)


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _mismatches(answer: Answer) -> Document:
    """Rows that do not agree, and rows whose source cut digits off instead of rounding."""
    off = [row for row in answer["rows"] if row["status"] in ("mismatch", "source_truncated")]
    if not off:
        return []
    cells = [
        [row["id"], row["status"].replace("_", " "), f"{row['measured']:.6g}", f"{row['predicted']:.8g}", row["reason"]]
        for row in off
    ]
    columns = [left("row"), left("status"), Column("printed"), Column("predicted"), left("reason")]
    return [BLANK, table(columns, cells)]


def _memory(answer: Answer) -> Document:
    overall = answer["overall"]
    out = overall["out_of_memory"]
    without = overall["unsupported"] + overall["incomplete"]
    beside = f"; {whole(out['match'])} of {whole(out['rows'])} out-of-memory rows exceed their card" * bool(out["rows"])
    return [
        Text(
            f"half of a source's runs are off by at most {percent(overall['median_abs_log_ratio'])}, nine of ten by"
            f" at most {percent(overall['p90_abs_log_ratio'])}: means over {whole(overall['scored_sources'])} sources"
            f" with {whole(overall['scored_rows'])} complete rows{beside}; {whole(without)} rows have no prediction",
            "answer",
        ),
        BLANK,
        _by_meter(answer),
        *(Text(line, "dim") for line in LEGEND),
        *_furthest(answer),
    ]


def _by_meter(answer: Answer) -> Table:
    """A line for each source and meter, in which tier C and meters that nobody named stand apart."""
    lines = [line for name, source in answer["sources"].items() for line in _lines(name, source)]
    overall = answer["overall"]
    for name, part in (
        ("mean", overall),
        ("mean, tier C", overall["tier_c"]),
        ("mean, meter not named", overall["unknown_meter"]),
    ):
        lines.append([name, "", whole(part["scored_rows"]), "", *_errors(part), *_errors(part["distinct"]), ""])
    columns = [
        left("source"),
        left("meter"),
        Column("rows"),
        Column("values"),
        Column("median"),
        Column("p90"),
        Column("median of values"),
        Column("p90 of values"),
        left("not scored"),
    ]
    return table(columns, lines)


def _lines(name: str, source: Answer) -> list[list[str]]:
    tier = " (tier C)" if source["tier_c"]["scored_rows"] and not source["scored_rows"] else ""
    idle = ", ".join(
        f"{whole(source[key])} {key.replace('_', ' ')}"
        for key in ("match", "mismatch", "unmeasured", "unsupported", "incomplete")
        if source[key]
    )
    lines = [
        [
            name + tier,
            meter,
            whole(part["scored_rows"]),
            whole(part["distinct"]["values"]),
            *_errors(part),
            *_errors(part["distinct"]),
            idle if index == 0 else "",
        ]
        for index, (meter, part) in enumerate(source["meters"].items())
    ]
    return lines or [[name + tier, "", "", "", "", "", "", "", idle]]


def _errors(part: Answer) -> list[str]:
    return [percent(part["median_abs_log_ratio"]), percent(part["p90_abs_log_ratio"])]


def _furthest(answer: Answer) -> Document:
    """The scored rows that are furthest off, and the rows that ran out of memory against what is predicted."""
    scored = [row for row in answer["rows"] if row["log_ratio"] is not None]
    scored.sort(key=lambda row: -abs(row["log_ratio"]))
    cells = [
        [
            row["id"],
            row["tier"],
            row["meter"],
            format_bytes(int(row["measured"])),
            format_bytes(int(row["predicted"])),
            f"{math.exp(row['log_ratio']):.3f}",
        ]
        for row in scored[:FAR]
    ]
    out = [Text(f"{row['id']}: {row['reason']}", "bad") for row in answer["rows"] if row["status"] == "mismatch"]
    columns = [
        left("furthest off"),
        left("tier"),
        left("meter"),
        Column("measured"),
        Column("predicted"),
        Column("predicted / measured"),
    ]
    return [*([BLANK, table(columns, cells)] if cells else []), *([BLANK, *out] if out else [])]
