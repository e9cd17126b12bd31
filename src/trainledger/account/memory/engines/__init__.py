"""Which engine passes what (passing.py): the words of a profile's `memory.passing`."""

from __future__ import annotations

from trainledger.account.memory.engines.flat_groups import FlatGroups
from trainledger.account.memory.engines.fsdp1 import Fsdp1
from trainledger.account.memory.engines.fsdp2 import Fsdp2
from trainledger.account.memory.engines.knobs import Knobs
from trainledger.account.memory.engines.megatron import DummyGradients, GroupedWorkspaces
from trainledger.account.memory.engines.nanotron import WaitingGradients
from trainledger.account.memory.engines.one_graph import OneGraph
from trainledger.account.memory.engines.passing import Passing
from trainledger.account.shares import Shares
from trainledger.inventory.inventory import Inventory

PASSING: dict[str, type[Passing]] = {
    "none": Passing,
    "dummy gradients": DummyGradients,
    "flat groups": FlatGroups,
    "fsdp1": Fsdp1,
    "fsdp2": Fsdp2,
    "fsdp2 knobs": Knobs,
    "grouped workspaces": GroupedWorkspaces,
    "one graph": OneGraph,
    "waiting gradients": WaitingGradients,
}


def passing_of(inventory: Inventory, own: Shares) -> Passing:
    """What passes on each stage of the plans of `own`."""
    return PASSING[inventory.setting.profile.memory.passing](inventory, own)
