"""Killed at any moment of a save, a run goes on from the last checkpoint that was published, as if nothing had been.

Checkpoints are saved after every step; a rank dies in the middle of one, and whatever it left, the next run finds the
newest whole one and has the losses of a run that nobody stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from checkpoint_runs import MOMENTS, STEPS, Ask, Ran, ran, spec_of, trained, writes_counted
from trainledger.runtime.checkpoint.folders import published
from trainledger.runtime.checkpoint.manifest import verify
from trainledger.runtime.launch.fork import RankFailed, run_forked

EVERY = tuple(range(1, STEPS))
IN_A_SHARD = "a shard is written"
WRITES = 12
"""Moments in the middle of a write to a shard, spread over all the writes of a run."""
OTHERS = (
    ("the copy to host memory", 150, 1),
    ("the folder is made", 2, 0),
    ("the parts are planned", 2, 1),
    ("the index is written", 2, 0),
    ("the state is written", 1, 0),
    ("the manifest is written", 2, 0),
    ("it is published", 1, 0),
    ("it is published, before the rename", 5, 0),
    ("old ones are removed", 1, 0),
    ("an old one is being removed", 3, 0),
)
"""The other moments, how often each is let pass before, and the rank that dies."""


class Death(NamedTuple):
    """What a run that was killed left: the newest step that was published, and whether a part of a save is there."""

    step: int
    partial: bool


def died(folder: Path, moment: str, passes: int, rank: int) -> Death:
    """Let a rank die; what is there afterwards, all of it whole."""
    ask = Ask(spec_of(), folder, saves=EVERY, keep_last=2, die=(moment, passes, rank))
    with pytest.raises(RankFailed) as failed:
        run_forked(2, trained, ask, STEPS, timeout_s=60)
    assert (failed.value.rank, failed.value.status) == (rank, -9)
    there = published(folder)
    for one in there:
        verify(one.path)
    return Death(there[0].step if there else 0, any(folder.glob(".step-*.partial")))


def goes_on(rank: int, folders: Sequence[Path]) -> list[Ran]:
    """What a run on one process, which has read what two have saved, sees from each."""
    alone = spec_of(plan="")
    return [trained(rank, Ask(alone, folder, load=True), STEPS) for folder in folders]


def check(deaths: dict[Path, Death], uninterrupted: Ran) -> None:
    """Every one goes on from what was published last, with the losses of the run that nobody stopped."""
    (found,) = run_forked(1, goes_on, list(deaths), timeout_s=300)
    for (folder, death), one in zip(deaths.items(), found, strict=True):
        assert one.begun == death.step, folder
        assert not one.skipped
        assert one.losses == pytest.approx(uninterrupted.losses[death.step :], rel=1e-6), folder
        assert not any(folder.glob(".step-*"))


def test_a_run_that_is_killed_goes_on_from_what_was_published(tmp_path: Path) -> None:
    """Two moments; the long test has twenty-two."""
    uninterrupted = ran(Ask(spec_of(), tmp_path / "whole"))
    deaths: dict[Path, Death] = {}
    for index, (moment, passes, rank) in enumerate(((IN_A_SHARD, 8000, 1), ("it is published", 2, 0))):
        folder = tmp_path / f"{index}"
        deaths[folder] = died(folder, moment, passes, rank)
        assert deaths[folder].partial
        assert deaths[folder].step > 0
    check(deaths, uninterrupted)


@pytest.mark.proof
def test_a_run_that_is_killed_at_any_moment_goes_on_from_what_was_published(tmp_path: Path) -> None:
    uninterrupted = ran(Ask(spec_of(), tmp_path / "whole"))
    counted = run_forked(2, writes_counted, Ask(spec_of(), tmp_path / "counted", saves=EVERY), timeout_s=60)
    moments = [(IN_A_SHARD, counted[index % 2] * (2 * index + 1) // (2 * WRITES), index % 2) for index in range(WRITES)]
    deaths: dict[Path, Death] = {}
    for index, (moment, passes, rank) in enumerate((*moments, *OTHERS)):
        folder = tmp_path / f"{index}"
        deaths[folder] = died(folder, moment, passes, rank)
        if moment == IN_A_SHARD:
            assert deaths[folder].partial
    assert {moment for moment, _, _ in OTHERS} | {IN_A_SHARD} == MOMENTS.keys()
    assert {death.step for death in deaths.values()} == set(range(STEPS - 1))
    check(deaths, uninterrupted)
