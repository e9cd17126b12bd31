"""The orders of the schedules that PyTorch has, as PyTorch 2.13 makes them."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.schedules import _Action, _ComputationType

from trainledger.schedules import Op, find_schedule

KINDS: dict[Any, str] = {
    _ComputationType.FORWARD: "forward",
    _ComputationType.FULL_BACKWARD: "backward",
    _ComputationType.BACKWARD_INPUT: "backward",
    _ComputationType.BACKWARD_WEIGHT: "weight",
}
SIZES = [(pp, m) for pp, m in product(range(2, 7), range(1, 14)) if m % max(m // pp, 1) == 0]


def read(actions: list[_Action | None]) -> list[tuple[str, int, int | None]]:
    """Work alone: waiting, and what data parallelism does once, left out."""
    return [
        (KINDS[action.computation_type], action.stage_index, action.microbatch_index)
        for action in actions
        if action is not None and action.computation_type in KINDS
    ]


def ours(name: str, pp: int, vpp: int, batches: int, stage: int) -> list[Op]:
    return list(find_schedule(name).ops(pp, vpp, batches, stage))


@pytest.mark.parametrize(
    ("name", "kind"), [("interleaved", ScheduleInterleaved1F1B), ("zero-bubble", ScheduleInterleavedZeroBubble)]
)
@pytest.mark.parametrize("vpp", [1, 2, 3])
def test_turns_are_pytorchs(name: str, kind: type[Any], vpp: int) -> None:
    for pp, batches in SIZES:
        theirs = object.__new__(kind)  # its __init__ wants stages, which want a model on every rank
        theirs.pp_group_size, theirs.n_local_stages, theirs._n_microbatches = pp, vpp, batches
        theirs.microbatches_per_round = batches // max(1, batches // pp)
        for rank in range(pp):
            order = read(theirs._calculate_single_rank_operations(rank))
            assert order == ours(name, pp, vpp, batches, rank), (pp, batches, rank)


@pytest.mark.parametrize(("name", "kind"), [("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)])
def test_orders_of_one_chunk_are_pytorchs(name: str, kind: type[Any]) -> None:
    """What is done when: the list that PyTorch 2.13 prints of 1F1B numbers the last stage's micro-batches from 1."""
    for pp, batches in SIZES:
        if batches < pp and name == "1f1b":
            continue  # PyTorch refuses it
        theirs = object.__new__(kind)
        theirs._num_stages, theirs._n_microbatches = pp, batches
        for rank, actions in theirs._get_pipeline_order().items():
            order = [work[0] for work in read(actions)]
            assert order == [op.kind for op in ours(name, pp, 1, batches, rank)], (pp, batches, rank)
