"""A prediction per row of a table, from its inputs alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainledger.scoring.exact_memory import predict_figure, reading_of
from trainledger.scoring.prediction import Prediction
from trainledger.scoring.runs import predict_run
from trainledger.scoring.states import predict_states
from trainledger.scoring.table import Table, load_table


def predict_csv(path: str | Path) -> dict[str, Any]:
    """Every row of a table with what is predicted of it, in the file's order.

    {"rows": [{"id", "status", "reason", "states" | "figure" | "memory_bytes", ...}]}: status is predicted, unsupported
    (no account answers what the row asks) or incomplete (the row leaves something open). Where it is predicted, a
    printed figure has `states`, or `figure` where it is of other memory, and a run `memory_bytes` by meter.
    `ignored_columns` is there where the table has columns that are neither input nor outcome.
    """
    table = load_table(path)
    rows: list[dict[str, Any]] = []
    for row, said in zip(table.rows, predictions(table), strict=True):
        entry: dict[str, Any] = {"id": row.id, "status": said.status, "reason": said.reason}
        if said.states is not None:
            entry["states"] = said.states.as_json()
        if said.memory is not None:
            entry |= said.memory.as_json()
        if said.figure is not None:
            entry["figure"] = said.figure.as_json()
        rows.append(entry)
    return with_ignored(table, {"rows": rows})


def predictions(table: Table) -> list[Prediction]:
    """What is predicted of each row. The predictor is handed the inputs and nothing else."""
    predict = _PREDICTORS[table.kind]
    return [predict(row.inputs) for row in table.rows]


def with_ignored(table: Table, response: dict[str, Any]) -> dict[str, Any]:
    """The response, and which columns of the table nobody read."""
    return {**response, "ignored_columns": list(table.ignored)} if table.ignored else response


def _exact(inputs: Mapping[str, str]) -> Prediction:
    """A figure of states, or of memory that is none."""
    reading = reading_of(inputs)
    return predict_states(inputs) if reading is None else predict_figure(inputs, reading)


_PREDICTORS: dict[str, Callable[[Mapping[str, str]], Prediction]] = {"exact": _exact, "runs": predict_run}
