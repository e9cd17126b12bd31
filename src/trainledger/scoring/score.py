"""Predictions graded against what the rows print, row by row, by source and over all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trainledger.errors import UnknownName
from trainledger.scoring.predict import predictions, with_ignored
from trainledger.scoring.prediction import Prediction
from trainledger.scoring.score_memory import score_memory
from trainledger.scoring.score_states import score_states
from trainledger.scoring.table import Table, load_table

WHAT: dict[str, Callable[[Table, Sequence[Prediction]], dict[str, Any]]] = {
    "states": score_states,
    "memory": score_memory,
}


def score_csv(path: str | Path, what: str) -> dict[str, Any]:
    """Every row of a table with its grade, in the file's order, then the sources, then all of them.

    {"what", "rows": [{"id", "source", "tier", "meter", "measured", "predicted", "log_ratio", "status", "reason"}],
    "sources", "overall"}. What a status means is said where each thing is scored: score_states.py, score_memory.py.
    """
    if what not in WHAT:
        raise UnknownName("thing to score", what, WHAT, f"write --what {' or '.join(WHAT)}")
    table = load_table(path)
    scored = WHAT[what](table, predictions(table))
    return with_ignored(table, {"what": what, **scored, "rows": msgspec.to_builtins(scored["rows"])})
