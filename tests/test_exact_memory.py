"""Printed figures of memory other than states: formulas to the digit, readings within half a percent, or refused."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from command_line import run
from trainledger.scoring import predict_csv, score_csv
from trainledger.scoring.exact_memory import predict_figure, reading_of

TRUTH = Path(__file__).parent / "data" / "exact_memory.csv"
FORMULAS = {
    "activation bytes per transformer layer": 24,
    "total activation bytes, first pipeline stage": 4,
    "attention term 5as/h": 2,
    "activation memory saved by selective recompute": 2,
    "max theoretical model size, 32 GB V100": 20,
}
STATES = {"model states per device": 54, "bytes per parameter": 12, "estimator output": 6}
REST = "MEASURED torch memory_allocated between steps, rank 0"
REFUSED = {
    "measured max runnable model size, 32 GB V100": (10, "shapes"),
    "FLOPs overhead of selective recompute": (2, "arithmetic"),
    "MEASURED one-layer time (22B, tp8, mbs 4, A100)": (5, "time"),
    "estimator input": (1, "count"),
    "memory breakdown per GPU before optimisation": (4, "expert parallelism"),
    "memory saved per GPU by fine-grained recompute": (4, "expert parallelism"),
    "MEASURED min/max GPU memory over ranks": (9, "shapes, layout"),
}
MEASURED_WITHIN = 0.005


def truth() -> dict[str, dict[str, str]]:
    with TRUTH.open(encoding="utf-8", newline="") as file:
        return {row["id"]: row for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def graded() -> list[dict[str, Any]]:
    return score_csv(TRUTH, "memory")["rows"]


def test_every_figure_that_a_formula_gives_is_met_to_its_last_digit(graded: list[dict[str, Any]]) -> None:
    rows = truth()
    found = {kind: Counter[str]() for kind in FORMULAS}
    for row in graded:
        kind = rows[row["id"]]["kind"]
        if kind in found:
            found[kind][row["status"]] += 1
    assert found == {kind: {"match": count} for kind, count in FORMULAS.items()}


def test_what_activations_come_to_is_met_to_the_byte(graded: list[dict[str, Any]]) -> None:
    rows = truth()
    exact = [row for row in graded if rows[row["id"]]["unit"] == "bytes"]
    assert len(exact) == 28
    assert all(row["predicted"] == row["measured"] for row in exact)


def test_what_nanotron_reads_between_steps_is_met(graded: list[dict[str, Any]]) -> None:
    rows = truth()
    read = [row for row in graded if rows[row["id"]]["kind"] == REST]
    assert len(read) == 10
    assert {row["status"] for row in read} == {"measured"}
    assert max(abs(row["log_ratio"]) for row in read) < MEASURED_WITHIN


def test_the_rest_is_refused_and_says_why(graded: list[dict[str, Any]]) -> None:
    rows = truth()
    refused = [row for row in graded if row["status"] == "unsupported"]
    by_kind = Counter(rows[row["id"]]["kind"] for row in refused)
    assert by_kind == {kind: count for kind, (count, _) in REFUSED.items()} | STATES
    for row in refused:
        kind = rows[row["id"]]["kind"]
        expected = REFUSED[kind][1] if kind in REFUSED else "--what states grades it"
        assert expected in row["reason"], row


def test_rows_are_predicted_from_their_inputs_alone() -> None:
    rows = [row for row in predict_csv(TRUTH)["rows"] if "figure" in row]
    assert len(rows) == sum(FORMULAS.values()) + 10
    layer = next(row for row in rows if row["id"] == "EXM-097")
    assert layer["figure"]["value"] == 7079985152
    assert layer["figure"]["profile"] == "paper"


@pytest.mark.parametrize(
    ("changed", "status", "says"),
    [
        ({"tp": ""}, "incomplete", "tp is blank"),
        ({"seq_len": ""}, "incomplete", "seq_len is blank"),
        ({"recompute": "half of it"}, "incomplete", "says nothing that is known"),
        ({"unit": "GB"}, "incomplete", "does not say how many bytes"),
        ({"tp": "7"}, "unsupported", "heads-divisible-by-tp"),
        ({"hidden": "", "model": "30B"}, "incomplete", "hidden is blank"),
    ],
)
def test_a_row_that_leaves_something_open_says_what(changed: dict[str, str], status: str, says: str) -> None:
    inputs = {**truth()["EXM-099"], **changed}
    reading = reading_of(inputs)
    assert reading is not None
    found = predict_figure(inputs, reading)
    assert (found.status, found.figure) == (status, None)
    assert says in found.reason


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"kind": "max theoretical model size"}, "names no memory of a card"),
        ({"unit": "params"}, "does not say how many parameters"),
        ({"zero_stage": ""}, "zero_stage is blank"),
    ],
)
def test_a_size_that_leaves_something_open_says_what(changed: dict[str, str], says: str) -> None:
    inputs = {**truth()["EXM-056"], **changed}
    reading = reading_of(inputs)
    assert reading is not None
    found = predict_figure(inputs, reading)
    assert found.status == "incomplete"
    assert says in found.reason


def test_shapes_that_contradict_a_stated_count_are_not_taken() -> None:
    inputs = {**truth()["EXM-160"], "n_params": "2000000000"}
    reading = reading_of(inputs)
    assert reading is not None
    assert "the shapes have 1109659648 parameters" in predict_figure(inputs, reading).reason


def test_the_text_tells_both_grades() -> None:
    done = run("score", str(TRUTH), "--what", "memory")
    assert done.out.startswith("52 of 52 figures of memory other than states agree to their last digit; 10 readings")
    assert "Korthikanti et al. 2022" in done.out
