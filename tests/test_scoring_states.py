"""Printed model states: every row that can be computed is reproduced, and no outcome reaches the predictor."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainledger.errors import UnknownName
from trainledger.scoring import predict_csv, score_csv
from trainledger.scoring.prediction import Prediction
from trainledger.scoring.states import predict_states
from trainledger.scoring.table import load_table, table_kinds

TRUTH = Path(__file__).parent / "data" / "exact_memory.csv"
STATE_KINDS = {"model states per device": 54, "bytes per parameter": 12, "estimator output": 6}
TRUNCATED = ["EXM-035", "EXM-047", "EXM-049", "EXM-050", "EXM-052", "EXM-053"]


def truth_rows() -> list[dict[str, str]]:
    with TRUTH.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    path.write_text(text.getvalue(), encoding="utf-8")
    return path


def figure(said: Prediction) -> Fraction:
    assert said.status == "predicted", said.reason
    assert said.states is not None
    return said.states.value


def test_every_printed_state_is_reproduced() -> None:
    rows = {row["id"]: row for row in truth_rows()}
    scored = score_csv(TRUTH, "states")
    assert [row["id"] for row in scored["rows"]] == list(rows)
    grades = {kind: Counter[str]() for kind in STATE_KINDS}
    for row in scored["rows"]:
        kind = rows[row["id"]]["kind"]
        if kind in grades:
            grades[kind][row["status"]] += 1
        else:
            assert row["status"] == "unsupported", row
            assert row["reason"]
    assert grades["model states per device"] == {"match": 48, "source_truncated": 6}
    assert grades["bytes per parameter"] == {"match": 12}
    assert grades["estimator output"] == {"match": 6}
    assert {kind: count.total() for kind, count in grades.items()} == STATE_KINDS
    assert scored["overall"]["source_truncated_ids"] == TRUNCATED
    assert scored["overall"]["mismatch_ids"] == []
    assert scored["overall"]["scored"] == 72


def test_each_source_is_summed_up_and_none_dominates_the_whole() -> None:
    scored = score_csv(TRUTH, "states")
    sources = scored["sources"]
    assert sum(source["rows"] for source in sources.values()) == 169
    medians = [source["median_abs_log_ratio"] for source in sources.values() if source["scored"]]
    assert len(medians) == 4
    assert scored["overall"]["median_abs_log_ratio"] == pytest.approx(sum(medians) / 4)
    assert sources["Korthikanti et al. 2022 Table 4"]["median_abs_log_ratio"] is None


@pytest.mark.parametrize("how", ["blank", "shift", "garbage", "drop"])
def test_the_predictor_cannot_see_an_outcome(tmp_path: Path, how: str) -> None:
    before = json.dumps(predict_csv(TRUTH))
    rows = truth_rows()
    for column in ("formula", "value_published", "value_recomputed", "note"):
        values = [row[column] for row in rows]
        values = values[37:] + values[:37]
        for row, value in zip(rows, values, strict=True):
            if how == "drop":
                del row[column]
            else:
                row[column] = {"blank": "", "shift": value, "garbage": '7", \n'}[how]
    assert json.dumps(predict_csv(write(tmp_path / "changed.csv", rows))) == before


def test_inputs_and_outcomes_are_apart() -> None:
    for row in load_table(TRUTH).rows:
        assert not {"formula", "value_published", "value_recomputed", "note"} & set(row.inputs)
    for columns in table_kinds().values():
        assert not any(columns.is_outcome(column) for column in columns.inputs)
        assert {*columns.whole, *columns.flags} <= set(columns.inputs)


def test_a_print_that_is_one_digit_off_is_a_mismatch(tmp_path: Path) -> None:
    rows = [row for row in truth_rows() if row["kind"] == "model states per device"]
    for row in rows:
        decimals = len(row["value_published"].partition(".")[2])
        row["value_published"] = str(Decimal(row["value_published"]) + Decimal(2).scaleb(-decimals))
    graded = score_csv(write(tmp_path / "off.csv", rows), "states")
    assert {row["status"] for row in graded["rows"]} == {"mismatch"}
    assert "half a unit of the last digit is" in graded["rows"][0]["reason"]
    assert all(row["log_ratio"] < 0 for row in graded["rows"])


def test_a_symbolic_print_is_compared_with_its_value(tmp_path: Path) -> None:
    rows = [row for row in truth_rows() if row["id"] == "EXM-092"]
    assert rows[0]["value_published"] == "6 + 12/d"
    for recomputed, status in (
        ("6.1875", "match"),
        ("6.188", "match"),
        ("6.19", "match"),
        ("6.1876", "mismatch"),
        ("", "incomplete"),
    ):
        rows[0]["value_recomputed"] = recomputed
        assert score_csv(write(tmp_path / "t.csv", rows), "states")["rows"][0]["status"] == status


def test_only_states_and_memory_are_scored() -> None:
    with pytest.raises(UnknownName, match=r"'time' is not a known thing to score; .*write --what states or memory"):
        score_csv(TRUTH, "time")


# The paper's own formulas (section 5), for sizes and cards that it does not print.
@settings(max_examples=60, deadline=None)
@given(billions=st.integers(1, 2000), dp=st.integers(1, 4096), stage=st.integers(0, 3), k=st.sampled_from([4, 8, 12]))
def test_any_row_of_the_zero_paper(billions: int, dp: int, stage: int, k: int) -> None:
    inputs = {
        "kind": "model states per device",
        "source": "ZeRO paper Figure 1",
        "n_params": f"{billions}000000000.0",
        "dp": str(dp),
        "zero_stage": str(stage),
        "precision": f"fp16 mixed, K={k}",
        "quantity": "params+grads+optimizer",
        "unit": "GB (1e9)",
    }
    whole, divided = {0: (4 + k, 0), 1: (4, k), 2: (2, 2 + k), 3: (0, 4 + k)}[stage]
    assert abs(figure(predict_states(inputs)) - billions * (whole + Fraction(divided, dp))) < Fraction(1, 10**7)


MEGATRON = {
    "kind": "bytes per parameter",
    "source": "Megatron-LM README distributed optimizer table",
    "quantity": "params+grads+optimizer",
    "unit": "bytes/param",
}


# Megatron-Core 0.20 at the step: 16-bit gradients get a fp32 copy, unless the optimizer is precision-aware.
@pytest.mark.parametrize(
    ("precision", "stage", "dp", "bytes_per_param"),
    [
        ("fp16 param, fp16 grads", "0", "", 20),
        ("fp16 param, fp16 grads", "1", "96", 4 + Fraction(16, 96)),
        ("bf16 param, bf16 grads", "0", "", 20),
        ("bf16 param, bf16 grads", "1", "8", 4 + Fraction(16, 8)),
        ("bf16 param, fp32 grads", "1", "3", 6 + Fraction(12, 3)),
        ("fp16 param, fp32 grads", "1", "16", 6 + Fraction(12, 16)),
        ("bf16", "1", "1000", 6 + Fraction(12, 1000)),
        ("fp32", "1", "8", 8 + Fraction(8, 8)),
        ("bf16 param, bf16 grads, precision-aware, bf16 moments", "1", "8", 4 + Fraction(6, 8)),
        (
            "bf16 param, fp32 grads, precision-aware optimizer (bf16 exp_avg, bf16 exp_avg_sq)",
            "1",
            "64",
            6 + Fraction(6, 64),
        ),
        ("params bf16; grads bf16; fp32 master; bf16 moments", "0", "", 10),
    ],
)
def test_megatron_by_its_words(precision: str, stage: str, dp: str, bytes_per_param: Fraction | int) -> None:
    said = predict_states({**MEGATRON, "precision": precision, "zero_stage": stage, "dp": dp})
    assert figure(said) == bytes_per_param
    assert said.states is not None
    assert (said.states.profile, said.states.instant) == ("megatron", "step")


ESTIMATOR = {
    "kind": "estimator output",
    "source": "DeepSpeed estimate_zero3_model_states_mem_needs example",
    "source_url": "github.com/deepspeedai/DeepSpeed docs/code-docs/source/memory.rst",
    "dp": "8",
    "gpus": "8",
    "unit": "GB printed (2^30)",
}


# What the estimator's code computes, in deepspeed/runtime/zero at v0.14.2 and at edaa722126.
@pytest.mark.parametrize(
    ("changes", "stage", "options", "expected"),
    [
        ({"model": "llama-7b (6738M)"}, "2", "offload_optimizer=none", Fraction(6738 * 10**6 * 6, 2**30)),
        (
            {"model": "llama-7b (6738M)", "source_url": "stage_1_and_2.py"},
            "2",
            "offload_optimizer=none",
            Fraction(6738 * 10**6 * 34, 8 * 2**30),
        ),
        ({"model": "llama-7b (6738M)"}, "2", "offload_optimizer=cpu", Fraction(6738 * 10**6 * 2, 2**30)),
        (
            {"model": "t5-11b (11307M, largest layer 131.07M)"},
            "3",
            "offload_param=none, offload_optimizer=none, zero_init=0",
            Fraction(11307 * 10**6 * 18, 8 * 2**30) + Fraction(4 * 131_070_000, 2**30),
        ),
        (
            {"model": "t5-11b (11307M, largest layer 131M)"},
            "3",
            "offload_param=cpu, offload_optimizer=cpu, zero_init=1",
            Fraction(4 * 131_000_000, 2**30),
        ),
        (
            {"model": "737.67M", "dp": "4", "gpus": "4", "unit": "MiB"},
            "3",
            "case3 gpu memory, largest layer params 32.90M",
            Fraction(4 * 32_900_000 + 2 * 737_670_000 // 4, 2**20),
        ),
    ],
)
def test_deepspeed_estimator_by_its_words(
    changes: dict[str, str], stage: str, options: str, expected: Fraction
) -> None:
    said = predict_states({**ESTIMATOR, **changes, "zero_stage": stage, "quantity": f"per GPU; {options}"})
    assert float(figure(said)) == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize(
    ("inputs", "status", "reason"),
    [
        ({**MEGATRON, "precision": "int4 param", "zero_stage": "0"}, "incomplete", "'int4'"),
        ({**MEGATRON, "precision": "", "zero_stage": "0"}, "incomplete", "precision is blank"),
        ({**MEGATRON, "precision": "bf16", "zero_stage": "1"}, "incomplete", "dp is blank"),
        ({**MEGATRON, "precision": "bf16"}, "incomplete", "zero_stage is blank"),
        ({**MEGATRON, "precision": "bf16", "zero_stage": "0", "unit": "GB"}, "incomplete", "how many bytes"),
        (
            {**MEGATRON, "precision": "bf16, fp8 moments, fp16 master", "zero_stage": "0"},
            "incomplete",
            "master copy fp16",
        ),
        ({**MEGATRON, "precision": "bf16 param, fp16 grads", "zero_stage": "0"}, "unsupported", "engine-grad-dtype"),
        ({**MEGATRON, "precision": "bf16", "zero_stage": "1", "dp": "4", "gpus": "6"}, "incomplete", "contradict"),
        ({**MEGATRON, "precision": "bf16", "zero_stage": "0", "tp": "2"}, "incomplete", "shapes-known"),
        (
            {**MEGATRON, "precision": "fp16 param, fp16 grads", "zero_stage": "0", "quantity": "grads"},
            "incomplete",
            "buffers",
        ),
        ({**MEGATRON, "precision": "bf16", "zero_stage": "1", "dp": "1e20"}, "unsupported", "dp is 1e20: at most"),
        ({**MEGATRON, "precision": "bf16", "zero_stage": "1e20", "dp": "4"}, "unsupported", "zero_stage is 1e20"),
        ({**MEGATRON, "precision": "bf16", "zero_stage": "1", "tp": "4", "gpus": "6"}, "incomplete", "remainder 2"),
        ({**MEGATRON, "source": "a blog"}, "unsupported", "a blog"),
        ({**MEGATRON, "kind": "iteration time"}, "unsupported", "iteration time"),
        ({**ESTIMATOR, "zero_stage": "3", "model": "7B", "quantity": "per GPU"}, "incomplete", "largest layer"),
        ({**ESTIMATOR, "zero_stage": "2", "model": "7B", "quantity": "per CPU"}, "unsupported", "host memory"),
        ({**ESTIMATOR, "zero_stage": "2", "model": "seven", "quantity": "per GPU"}, "incomplete", "n_params"),
        ({**ESTIMATOR, "zero_stage": "1", "model": "7B", "quantity": "per GPU"}, "unsupported", "engine-zero-stage"),
        ({**ESTIMATOR, "zero_stage": "2", "model": "7B", "quantity": "swap=1"}, "incomplete", "option swap"),
        (
            {**ESTIMATOR, "zero_stage": "3", "model": "7B, largest layer 1M", "quantity": "offload_param=cpu"},
            "unsupported",
            "offloads parameters alone",
        ),
    ],
)
def test_a_row_that_says_too_little_is_told_what_is_missing(inputs: dict[str, str], status: str, reason: str) -> None:
    said = predict_states(inputs)
    assert said.status == status
    assert reason in said.reason
    assert said.states is None


def test_categories_alone_can_be_asked_for() -> None:
    row = {**MEGATRON, "source": "ZeRO paper section 3", "precision": "fp16 mixed, Adam K=12", "zero_stage": "0"}
    assert [
        int(figure(predict_states({**row, "quantity": q}))) for q in ("params", "grads", "optimizer", "params+grads")
    ] == [2, 2, 12, 4]
