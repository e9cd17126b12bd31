"""Over how many ranks each state is divided: the only file that knows what ZeRO shards.

Two classes of tensors: dense ones, whose gradients are averaged over data x context parallel ranks, and routed
experts, whose group is what tensor x context x data parallelism leaves after expert parallelism.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from trainledger.arrays import IntArray
from trainledger.plans.plan import Plans

State = Literal["weights", "gradients", "optimizer"]
SHARDED_FROM: dict[State, int] = {"optimizer": 1, "gradients": 2, "weights": 3}
"""The zero_stage from which a state is divided. [zero-paper: section 5, P_os, P_os+g, P_os+g+p]"""


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


def divisor(plans: Plans, state: State, *, expert: bool) -> IntArray:
    """By how much one rank's share of `state` is divided under each plan's zero_stage."""
    sharded = plans.zero_stage >= SHARDED_FROM[state]
    return np.where(sharded, shard_group(plans, expert=expert), 1)
