"""What a run holds outside of its steady step: as it loads, in its first step, on its hosts, and what saving takes."""

from __future__ import annotations

from trainledger.account.memory.outside.disk import on_disk
from trainledger.account.memory.outside.first import first_step
from trainledger.account.memory.outside.host import activations, offloaded
from trainledger.account.memory.outside.line import Outside
from trainledger.account.memory.outside.rows import from_profile
from trainledger.account.memory.stage import StageMemory
from trainledger.account.shares import Shares
from trainledger.inventory.inventory import Inventory

__all__ = ["Outside", "outside"]

_ORDER = ("load", "first step", "all the time", "save")


def outside(inventory: Inventory, own: Shares, stages: StageMemory) -> tuple[Outside, ...]:
    """The lines of a single plan in the order of a run; those of 0 B are left out."""
    found = [
        *from_profile(inventory, own),
        *first_step(inventory, own, stages),
        *offloaded(inventory, own),
        *activations(inventory, own, stages),
        *on_disk(inventory),
    ]
    return tuple(sorted((line for line in found if line.amount), key=lambda line: _ORDER.index(line.when)))
