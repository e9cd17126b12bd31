"""Over how many ranks each state is divided: the only file that knows what ZeRO shards.

Two classes of tensors: dense ones, whose gradients are averaged over data x context parallel ranks, and routed
experts, whose group is what tensor x context x data parallelism leaves after expert parallelism.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trainledger.arrays import IntArray
from trainledger.plans.plan import Plans


def dense_group(plans: Plans) -> IntArray:
    """Ranks over which dense gradients are averaged: dp x cp."""
    return plans.dp * plans.cp


def expert_group(plans: Plans) -> IntArray:
    """Ranks that hold the same routed experts: tp x cp x dp / (etp x ep). [megatron: parallel_state, expert grid]"""
    return np.maximum(plans.tp * plans.cp * plans.dp // (plans.etp * plans.ep), 1)


def shard_group(plans: Plans, *, expert: bool) -> IntArray:
    """Ranks that divide a sharded state among them: the averaging group without its replicas.

    >>> from trainledger.plans.plan import make_plans
    >>> hybrid = make_plans({"dp_replicate": 2, "dp_shard": 4, "cp": 2})
    >>> shard_group(hybrid, expert=False).tolist()
    [8]
    """
    group = expert_group(plans) if expert else dense_group(plans)
    return np.maximum(group // plans.dp_replicate, 1)


def divisor(plans: Plans, group: IntArray, sharded_from: int) -> IntArray:
    """By how much a state is divided: by its group from zero_stage `sharded_from` on, by 1 below it.

    The paper divides the optimizer from 1, gradients from 2, weights from 3; engines differ, and their profiles say
    how. [zero-paper: section 5, P_os, P_os+g, P_os+g+p]

    >>> from trainledger.plans.plan import make_plans
    >>> plans = make_plans({"dp_shard": 8, "zero_stage": [0, 1, 2, 3]})
    >>> divisor(plans, shard_group(plans, expert=False), 2).tolist()
    [1, 1, 8, 8]
    """
    return np.where(plans.zero_stage >= sharded_from, group, 1)


def wrapped(plans: Plans, how: Literal["ddp", "unit", "none"]) -> NDArray[np.bool_]:
    """[plans]: where PyTorch's data parallelism wraps a model so, if weights are not cast to be multiplied.

    none   one rank averages its own gradients
    ddp    zero_stage 0 and no parallelism but data: DistributedDataParallel, which casts nothing
    unit   else: FSDP2, or replicas, unit by unit; and everywhere, if weights are cast

    [torch-ddp, torch-replicate, fsdp2-units]

    >>> from trainledger.plans.plan import make_plans
    >>> plans = make_plans({"dp_shard": [1, 4, 4], "tp": [1, 1, 2]})
    >>> [wrapped(plans, how).tolist() for how in ("none", "ddp", "unit")]
    [[True, False, False], [False, True, False], [False, False, True]]
    """
    alone = dense_group(plans) == 1
    if how == "none":
        return alone
    ddp = (plans.zero_stage == 0) & (plans.tp * plans.pp * plans.cp * plans.ep == 1) & ~alone
    return ddp if how == "ddp" else ~(alone | ddp)
