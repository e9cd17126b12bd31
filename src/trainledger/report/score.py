"""`score` as text: one row per source, none dropped."""

from __future__ import annotations

from trainledger.report.document import BLANK, Column, Document, Style, Table, Text, left, table
from trainledger.report.predict import ignored, reasons
from trainledger.report.words import Answer, whole

COUNTS = ("rows", "scored", "match", "source_truncated", "mismatch", "unsupported", "incomplete")


def document(answer: Answer) -> Document:
    """The grade over all, then by source, then what is off and what has no prediction."""
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
        *reasons(answer["rows"], {"unsupported", "incomplete"}),
        *ignored(answer),
    ]


def _sources(answer: Answer) -> Table:
    named = [*answer["sources"].items(), ("all", answer["overall"])]
    cells = [
        [name, *(whole(counts[key]) for key in COUNTS), _error(counts["median_abs_log_ratio"])]
        for name, counts in named
    ]
    styles: list[Style] = ["bad" if counts["mismatch"] else "" for _, counts in named]
    columns = [
        left("source"),
        *(Column(key.replace("source_", "").replace("_", " ")) for key in COUNTS),
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
