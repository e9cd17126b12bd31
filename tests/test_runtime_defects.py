"""Defects of PyTorch 2.13: each is shown in PyTorch alone, and what works around it holds.

Where a test of PyTorch alone turns red, PyTorch has been mended, and the workaround can go.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from defect_runs import SCALE, Scaled, Scaling, divided, losses, saved_while_training, saves_in_turn, scaled
from parity import Cell, alone, task_of
from trainledger.runtime.launch.fork import RankFailed, run_forked

STEPPED, KEPT = [-1.0, -1.0], [0.0, 0.0]
BACKED_OFF = SCALE / 2

ALONE = [Scaling(("whole", "cut"), 1, ours=False), Scaling(("plain",), 1, ours=False)]
"""PyTorch's scaler asks the first gradient how all of them lie, and nobody where they are plain."""
OURS = [
    Scaling(layouts, bad, ours=True)
    for layouts in (("whole", "cut"), ("cut", "whole", "cut"), ("plain",), ("cut", "plain"))
    for bad in (0, 1)
]
SOUND = Scaling(("whole", "cut", "plain"), None, ours=True)


@cache
def scalings() -> dict[Scaling, list[Scaled]]:
    """What both ranks see of every step above."""
    steps = [*ALONE, *OURS, SOUND]
    return dict(zip(steps, map(list, zip(*run_forked(2, scaled, steps), strict=True)), strict=True))


@pytest.mark.parametrize("step", ALONE)
def test_under_a_scaler_alone_ranks_part_where_one_has_an_infinity(step: Scaling) -> None:
    sound, bad = scalings()[step]
    assert (sound.weights[0], sound.scale) == (STEPPED, SCALE)
    assert (bad.weights[0], bad.scale) == (KEPT, BACKED_OFF)


@pytest.mark.parametrize("step", OURS)
def test_every_rank_skips_where_one_has_an_infinity(step: Scaling) -> None:
    assert scalings()[step] == [Scaled([KEPT] * len(step.layouts), BACKED_OFF)] * 2


def test_every_rank_steps_where_none_has_an_infinity() -> None:
    assert scalings()[SOUND] == [Scaled([STEPPED] * 3, SCALE)] * 2


def test_a_save_on_the_group_of_training_meets_the_training(tmp_path: Path) -> None:
    """Each rank waits in its own all-reduce, one of them with what the other saves."""
    with pytest.raises(RankFailed, match=r"(?s)rank 0, 1 of 2 did not end.*in all_reduce.*rank 1.*in all_reduce"):
        run_forked(2, saved_while_training, tmp_path / "checkpoint", False, timeout_s=6)


def test_a_save_on_a_group_of_its_own_lets_training_go_on(tmp_path: Path) -> None:
    """And holds the weights of the moment it began."""
    found = run_forked(2, saved_while_training, tmp_path / "checkpoint", True)
    assert found == [[1.0] * 3 + [2.0] * 3] * 2


def test_saves_are_one_at_a_time_and_an_error_is_told_to_the_next() -> None:
    for happened, told in run_forked(2, saves_in_turn):
        assert happened == ["first", "second", "fourth"]
        assert told == "the disk is full"


def test_a_root_that_is_told_to_reshard_alone_trains_on_stale_weights() -> None:
    """Units are told one by one in the program: its losses are those of a single process."""
    task = task_of(Cell("llama", {"dp_shard": 2, "zero_stage": 2}), "sgd")
    (right,) = run_forked(1, losses, alone(task).spec, False)
    stale, _ = run_forked(2, losses, task.spec, True)
    told, _ = run_forked(2, losses, task.spec, False)
    assert stale[0] == pytest.approx(right[0], rel=1e-6)
    assert stale[1:] != pytest.approx(right[1:], rel=1e-3)
    assert told == pytest.approx(right, rel=1e-5)


def test_a_sum_that_is_forced_over_one_rank_is_divided_twice() -> None:
    """So the program forces it over several ranks only; one does not miss it."""
    assert [run_forked(ranks, divided, 4.0, True)[0] for ranks in (1, 2)] == [1 / 16, 2 / 4]
    assert run_forked(1, divided, 4.0, False) == [1 / 4]
