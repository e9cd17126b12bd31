"""A prediction per row of a table, from its inputs alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainledger.scoring.states import Prediction, predict_states
from trainledger.scoring.table import Table, load_table


def predict_csv(path: str | Path) -> dict[str, Any]:
    """Every row of a table with what is predicted of it, in the file's order.

    {"rows": [{"id", "status", "reason", "states"}]}: status is predicted, unsupported (no account answers what the row
    asks) or incomplete (the row leaves something open); `states` is there where it is predicted. `ignored_columns` is
    there where the table has columns that are neither input nor outcome.
    """
    table = load_table(path)
    rows: list[dict[str, Any]] = []
    for row, said in zip(table.rows, predictions(table), strict=True):
        entry: dict[str, Any] = {"id": row.id, "status": said.status, "reason": said.reason}
        if said.states is not None:
            entry["states"] = said.states.as_json()
        rows.append(entry)
    return with_ignored(table, {"rows": rows})


def predictions(table: Table) -> list[Prediction]:
    """What is predicted of each row. The predictor is handed the inputs and nothing else."""
    predict = _PREDICTORS[table.kind]
    return [predict(row.inputs) for row in table.rows]


def with_ignored(table: Table, response: dict[str, Any]) -> dict[str, Any]:
    """The response, and which columns of the table nobody read."""
    return {**response, "ignored_columns": list(table.ignored)} if table.ignored else response


def _run(inputs: Mapping[str, str]) -> Prediction:
    return Prediction(
        status="unsupported",
        reason=f"{inputs.get('model') or 'a run'}: a measured run prints its step time and its memory at the peak, "
        "never its states alone, so it holds no figure of states",
    )


_PREDICTORS: dict[str, Callable[[Mapping[str, str]], Prediction]] = {"exact": predict_states, "runs": _run}
