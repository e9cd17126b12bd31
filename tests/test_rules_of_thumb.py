"""The rule of thumb in its two conventions, against the paper's table, the paper's profile and the copied function."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trainledger
from trainledger.account.rules_of_thumb import zero_mem
from trainledger.account.states import state_account
from trainledger.errors import BadInput
from trainledger.facts.by_hand import model_from_count
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Scenario, make_plans
from trainledger.plans.setting import make_setting

TRUTH = Path(__file__).parent / "data" / "exact_memory.csv"


@pytest.mark.parametrize(
    ("options", "by_stage"),
    [
        ({}, [1120.0, 293.1, 155.3, 17.5]),
        ({"fp8": True}, [1050.0, 223.1, 85.3, 16.4]),
        ({"master": False}, [840.0, 288.8, 150.9, 13.1]),
        ({"fp8": True, "master": False}, [770.0, 218.8, 80.9, 12.0]),
        ({"convention": "published"}, [840.0, 288.8, 13.1, 13.1]),
        ({"convention": "published", "fp8": True}, [700.0, 148.8, 10.9, 10.9]),
        ({"convention": "published", "fp8": True, "master": False}, [700.0, 148.8, 10.9, 10.9]),
    ],
)
def test_70b_on_64_cards(options: dict[str, object], by_stage: list[float]) -> None:
    assert [trainledger.zero_mem(70, 64, stage, **options) for stage in range(4)] == by_stage  # type: ignore[arg-type]


def test_the_papers_table() -> None:
    """Table 1 of the ZeRO paper, through its recomputed column."""
    with TRUTH.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["source"] == "ZeRO paper Table 1"]
    assert len(rows) == 54
    for row in rows:
        said = zero_mem(float(row["n_params"]) / 1e9, int(row["dp"]), int(row["zero_stage"]))
        assert said == pytest.approx(float(row["value_recomputed"]), abs=0.0506)


@settings(max_examples=40, deadline=None)
@given(billions=st.integers(1, 1000), gpus=st.integers(1, 2048), stage=st.integers(0, 3))
def test_mixed_is_the_papers_profile(billions: int, gpus: int, stage: int) -> None:
    setting = make_setting(model_from_count(billions * 10**9), Workload(), Scenario(engine="paper"))
    held = state_account(Inventory(setting), make_plans({"dp_shard": gpus, "zero_stage": stage})).at("rest")
    assert zero_mem(billions, gpus, stage) == round(int(np.max(held)) / 1e9, 1)


@settings(max_examples=40, deadline=None)
@given(billions=st.floats(0.1, 2000), gpus=st.integers(1, 2048), stage=st.integers(0, 3), fp8=st.booleans())
def test_published_is_the_copied_function(billions: float, gpus: int, stage: int, fp8: bool) -> None:
    weights = billions * (1 if fp8 else 2)
    gradients, optimizer = weights, billions * 8
    expected = (
        weights + gradients + optimizer,
        weights + gradients + optimizer / gpus,
        (weights + gradients) / gpus + optimizer / gpus,
        (weights + gradients + optimizer) / gpus,
    )[stage]
    assert zero_mem(billions, gpus, stage, fp8=fp8, convention="published") == pytest.approx(expected, abs=0.0501)


@settings(max_examples=30, deadline=None)
@given(billions=st.integers(1, 500), gpus=st.integers(2, 512), fp8=st.booleans(), master=st.booleans())
def test_a_higher_stage_never_holds_more(billions: int, gpus: int, fp8: bool, master: bool) -> None:
    held = [zero_mem(billions, gpus, stage, fp8=fp8, master=master) for stage in range(4)]
    assert held == sorted(held, reverse=True)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((70, 64, 4), r"zero_stage is 4: it takes a whole number from 0 to 3; 0 divides nothing"),
        ((70, 64, -1), r"zero_stage is -1"),
        ((70, 64, True), r"zero_stage is True"),
        ((70, 0, 3), r"gpus is 0: it takes a whole number from 1 to 1048576; give the cards"),
        ((70, 6.5, 3), r"gpus is 6\.5"),
        ((0, 64, 3), r"n_params_b is 0: it is in billions, from 1e-9 to 1000000; write 70"),
        ((-7, 64, 3), r"n_params_b is -7"),
        ((70e9, 64, 3), r"n_params_b is 70000000000\.0: it is in billions"),
        ((float("inf"), 64, 3), r"n_params_b is inf"),
        (("70", 64, 3), r"n_params_b is '70': it takes a number of billions"),
        ((70, 64, 3, False, True, "mixt"), r"'mixt' is not a known convention; nearest: mixed"),
    ],
)
def test_what_it_refuses(arguments: tuple[object, ...], complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        zero_mem(*arguments)  # type: ignore[arg-type]
