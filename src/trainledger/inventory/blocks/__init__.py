"""What the parts of a model keep and need in each manner of running them: `memory.blocks` of a profile."""

from __future__ import annotations

from collections.abc import Callable

from trainledger.inventory.blocks import megatron, plain
from trainledger.inventory.blocks.parts import Parts
from trainledger.inventory.blocks.sizes import Sizes
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Plans

MANNERS: dict[str, Callable[[Inventory, Sizes], Parts]] = {"plain": plain.parts, "megatron": megatron.parts}


def parts_of(inventory: Inventory, plans: Plans) -> Parts:
    """The tapes of one micro-batch on one rank of each plan."""
    return MANNERS[inventory.setting.profile.memory.blocks](inventory, Sizes(inventory.setting, plans))
