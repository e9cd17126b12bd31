"""A cut run is the run of a single process: gradients, the norm of clipping, and replicas of weights."""

from __future__ import annotations

import copy
import secrets
import sys
from functools import cache

import numpy as np
import pytest

from parity import (
    STEPS,
    TOLERANCE,
    UNUSED,
    Cell,
    Seen,
    Worst,
    check,
    compared,
    idle_experts,
    references,
    task_of,
    tasks_of,
    worlds,
)
from parity_cells import QUICK, matrix, random_cell
from trainledger.plans.plan import make_plans
from trainledger.plans.ranks import world_size

RANDOM_PLANS = 20


def ranks_of(cell: Cell) -> int:
    return world_size(make_plans(cell.plan).row(0))


@cache
def proved(ranks: int) -> dict[str, Worst]:
    """The worst of every quick cell on so many ranks, which are started once for all of them."""
    cells = [cell for cell in QUICK if ranks_of(cell) == ranks]
    runs = [(cell, task) for cell in cells for task in tasks_of(cell)]
    tasks = [task for _, task in runs]
    found: dict[str, Worst] = {}
    for (cell, _), seen, right in zip(runs, worlds(tasks), references(tasks), strict=True):
        found[cell.name] = max(found.get(cell.name, Worst(0.0, "")), compared(seen, right))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.name) for cell in QUICK])
def test_every_layout_trains_as_a_single_process(cell: Cell) -> None:
    """Every gradient, whole, at the first and the tenth step; the norm at every step; replicas equal to the bit."""
    assert proved(ranks_of(cell))[cell.name] < (TOLERANCE,)


@pytest.mark.proof
@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.name) for cell in matrix()])
def test_every_layout_of_every_model_trains_as_a_single_process(cell: Cell) -> None:
    assert check(cell) < (TOLERANCE,)


@pytest.mark.proof
@pytest.mark.parametrize("number", range(RANDOM_PLANS))
def test_any_legal_plan_trains_as_a_single_process(number: int, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    cell = random_cell(seed + number)
    with capsys.disabled():
        sys.stdout.write(f"\nrandom_cell({seed + number}): {cell.name}\n")
    assert check(cell) < (TOLERANCE,), f"random_cell({seed + number})"


@pytest.fixture(scope="module")
def seed() -> int:
    """Another one in every run, printed with what it gives."""
    return secrets.randbelow(1_000_000)


@pytest.fixture(scope="module")
def pair() -> tuple[Seen, Seen]:
    """What a run of one process sees, twice."""
    (right,) = references([task_of(QUICK[0], "sgd")])
    return copy.deepcopy(right), right


def test_a_gradient_that_is_off_by_little_is_found(pair: tuple[Seen, Seen]) -> None:
    seen, right = copy.deepcopy(pair[0]), pair[1]
    assert compared([seen, seen], right).error == 0.0
    name = "model.layers.1.input_layernorm.weight"
    seen.gradients[STEPS][name] *= np.float32(1 + 3 * TOLERANCE)
    worst = compared([right, seen], right)
    assert TOLERANCE < worst.error < 4 * TOLERANCE
    assert worst.where == f"{name} at step {STEPS} on rank 1"


def test_a_norm_that_is_off_is_found(pair: tuple[Seen, Seen]) -> None:
    seen, right = copy.deepcopy(pair[0]), pair[1]
    seen.norms[4] *= 1 + 3 * TOLERANCE
    assert compared([seen], right).where == "the norm of step 5 on rank 0"
    assert compared([seen], right).error > TOLERANCE


def test_a_parameter_that_no_rank_has_is_missed(pair: tuple[Seen, Seen]) -> None:
    seen, right = copy.deepcopy(pair[0]), pair[1]
    del seen.gradients[1]["lm_head.weight"]
    assert compared([seen, right], right).error == 0.0
    with pytest.raises(AssertionError, match="lm_head"):
        compared([seen, seen], right)


def test_replicas_that_differ_in_a_bit_are_found(pair: tuple[Seen, Seen]) -> None:
    seen, right = copy.deepcopy(pair[0]), pair[1]
    seen.parts[("lm_head.weight",)] = "0" * 64
    with pytest.raises(AssertionError, match=r"replicas differ.*lm_head"):
        compared([right, seen], right)


def test_uneven_routing_leaves_one_expert_without_a_token() -> None:
    """In every layer, at the first step and the tenth."""
    cell = next(cell for cell in QUICK if cell.uneven)
    uneven, even = references([task_of(cell, "sgd"), task_of(cell._replace(uneven=False), "sgd")])
    assert (idle_experts(uneven), idle_experts(even)) == ({UNUSED}, set())
