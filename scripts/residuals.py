"""Write how far predicted peaks have been off, by engine and meter: what bounds of later predictions are made of.

    python scripts/residuals.py [--check]

A residual is the natural logarithm of predicted over measured of a published run of tier A or B; a peak that several
rows print counts once, by its median. `pooled` takes every engine, for those of which no run is published.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainledger.facts.load import DATA
from trainledger.scoring.predict import predictions
from trainledger.scoring.score import score_csv
from trainledger.scoring.table import load_table

RUNS = DATA / "measured" / "runs.csv"
RESIDUALS = DATA / "measured" / "residuals.toml"
LOW, HIGH = 0.05, 0.95
POOLED = "pooled"
HEAD = """# Written by scripts/residuals.py. Logarithms of predicted over measured peaks of runs.csv, tiers A and B:
# low and high are the 5 % and 95 % quantiles over distinct measured values.
"""


def text() -> str:
    """The file."""
    lines = [HEAD]
    for (engine, meter), values in sorted(residuals().items()):
        low, high = np.quantile(values, (LOW, HIGH))
        lines.append(f"[{engine}.{meter}]\nvalues = {len(values)}\nlow = {low:.4f}\nhigh = {high:.4f}\n")
    return "\n".join(lines)


def residuals() -> dict[tuple[str, str], list[float]]:
    """(engine, meter) -> one residual for each distinct measured value."""
    found: dict[tuple[str, str], dict[tuple[str, float], list[float]]] = {}
    for engine, row in _graded():
        key = (row["source"], row["measured"])
        for name in (engine, POOLED):
            found.setdefault((name, row["meter"]), {}).setdefault(key, []).append(row["log_ratio"])
    return {key: [float(np.median(members)) for members in values.values()] for key, values in found.items()}


def _graded() -> Iterator[tuple[str, Mapping[str, Any]]]:
    said = predictions(load_table(RUNS))
    for row, one in zip(score_csv(RUNS, "memory")["rows"], said, strict=True):
        if row["log_ratio"] is not None and row["tier"] != "C" and row["meter"] and one.memory is not None:
            yield one.memory.profile, row


def main(arguments: list[str]) -> int:
    """Write or check; the exit status is 1 when a check finds the file out of date."""
    new = text()
    old = RESIDUALS.read_text(encoding="utf-8") if RESIDUALS.is_file() else ""
    if new == old:
        return 0
    if arguments == ["--check"]:
        print(f"residuals: {RESIDUALS.relative_to(Path.cwd())} is out of date; run python scripts/residuals.py")
        return 1
    RESIDUALS.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
