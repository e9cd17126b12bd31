"""What the parts of a model keep and need in each manner of running them: `memory.blocks` of a profile."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from trainledger.inventory.blocks import megatron, nanotron, plain, titan, transformers
from trainledger.inventory.blocks.eager import parts as eager
from trainledger.inventory.blocks.eager import unlike
from trainledger.inventory.blocks.parts import Parts
from trainledger.inventory.blocks.sizes import Sizes
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Plans

MANNERS: dict[str, Callable[[Inventory, Sizes], Parts]] = {
    "plain": plain.parts,
    "megatron": megatron.parts,
    "megatron before dummies": megatron.earlier_parts,
    "megatron native": megatron.native_parts,
    "megatron deepspeed": megatron.deepspeed_parts,
    "nanotron": nanotron.parts,
    "titan": titan.parts,
    "eager": eager.parts,
    "transformers": transformers.parts,
}

SOURCES: dict[str, tuple[str, ...]] = {
    "plain": ("korthikanti",),
    "megatron": ("megatron", "te"),
    "megatron before dummies": ("megatron", "te"),
    "megatron native": ("megatron", "zero-bubble-fork"),
    "megatron deepspeed": ("megatron-deepspeed",),
    "nanotron": ("nanotron",),
    "titan": ("torchtitan", "torch"),
    "eager": ("torch",),
    "transformers": ("transformers", "torch"),
}
"""Where the operations of a manner were read: keys of data/references.toml."""

UNLIKE: dict[str, Callable[[Plans], NDArray[np.bool_]]] = {
    "nanotron": nanotron.unlike,
    "titan": titan.unlike,
    "eager": unlike,
    "transformers": unlike,
}
"""[plans, n] of a manner: what plans must agree in to run the same operations; of manners not named here, nothing."""


def parts_of(inventory: Inventory, plans: Plans) -> Parts:
    """The tapes of one micro-batch on one rank of each plan."""
    manner = MANNERS[inventory.setting.profile.memory.blocks]
    return inventory.once("parts", plans, lambda: manner(inventory, Sizes(inventory.setting, plans)))


def alike(inventory: Inventory, plans: Plans) -> list[NDArray[np.int64]]:
    """Plans of one setting by the operations that they run: the rows of each sort, which have tapes in common."""
    manner = UNLIKE.get(inventory.setting.profile.memory.blocks)
    if manner is None or len(plans) == 1:
        return [np.arange(len(plans))]
    _, sort = np.unique(manner(plans), axis=0, return_inverse=True)
    return [np.flatnonzero(sort == index) for index in range(int(sort.max()) + 1)]
