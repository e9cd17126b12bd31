"""Where and when a rank holds most, of one plan or of many, and how certain that is."""

from __future__ import annotations

import msgspec
import numpy as np

from trainledger.account.memory import StageMemory, stage_memory
from trainledger.account.shares import shares
from trainledger.account.states import alive_at, buffer_bytes, on_host, plan_mask
from trainledger.inventory.inventory import Inventory
from trainledger.inventory.tensors import BoolArray
from trainledger.lines import BASES, Basis
from trainledger.plans.plan import Plans
from trainledger.plans.setting import Setting
from trainledger.profiles.profile import CATEGORIES, INSTANTS, Category, Instant


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """Where and when a rank holds most: bytes by category at that stage, each at its own largest, and the total.

    place          the place of the step in words; `instant` is that of the states that are there
    to_come_bytes  gradients that the states of that instant count and that are not there yet
    beside_bytes   context and communicators, which no tensor is
    """

    pp_stage: int
    place: str
    instant: Instant
    by_category: dict[Category, int]
    at_instants: dict[Instant, int]
    states_bytes: int
    activations_bytes: int
    total_bytes: int
    to_come_bytes: int
    beside_bytes: int
    host_bytes: int

    @property
    def device_bytes(self) -> int:
        """What "fits" compares with the card: all that is allocated and what lies beside it."""
        return self.total_bytes + self.beside_bytes


def peak_of(memory: StageMemory, plan: int = 0) -> Peak:
    """The stage and place at which plan number `plan` holds most."""
    totals = memory.totals(plan)
    place, where = (int(index) for index in np.unravel_index(int(totals.argmax()), totals.shape))
    there: list[int] = totals[:, where].tolist()
    row, acting = int(memory.states.index[plan]), int(memory.which[plan])
    found = memory.places[place]
    at_instants: dict[Instant, int] = dict.fromkeys(INSTANTS, 0)
    activations = passing = 0
    for index, other in enumerate(memory.places):
        at_instants[other.states] = max(at_instants[other.states], there[index])
        if other.here[acting, where]:
            activations = max(activations, int(other.active[acting, where]))
            passing = max(passing, int((memory.passing[index] + memory.to_come(index))[row, where]))
    by_category: dict[Category, int] = {c: int(memory.states.largest(c)[row, where]) for c in CATEGORIES}
    by_category["buffers"] += passing + memory.workspace_bytes
    return Peak(
        pp_stage=int(memory.pp_stage[plan, where]),
        place=found.label,
        instant=found.states,
        by_category=by_category,
        at_instants=at_instants,
        states_bytes=there[place] - int(found.active[acting, where]),
        activations_bytes=activations,
        total_bytes=there[place],
        to_come_bytes=int(memory.to_come(place)[row, where]),
        beside_bytes=int(memory.beside[plan]),
        host_bytes=int(memory.host[plan, where]),
    )


def single_peak(inventory: Inventory, plans: Plans) -> Peak:
    """The peak of a Plans of length one."""
    return peak_of(stage_memory(inventory, plans))


def host_holds(setting: Setting, plans: Plans, memory: StageMemory) -> BoolArray:
    """[plans]: where a rank's share of its node's memory holds what is offloaded; everywhere if it is not known."""
    cluster = setting.cluster
    if cluster is None or cluster.host_bytes is None:
        return np.ones(len(plans), dtype=np.bool_)
    share = cluster.host_bytes // np.minimum(cluster.gpus_per_node, plans.gpus)
    return memory.host.max(axis=1) <= share


def by_basis(inventory: Inventory, plans: Plans, peak: Peak) -> dict[Basis, int]:
    """Device bytes of a single plan at the stage and place of its peak, by basis; bases that hold nothing left out.

    Activations and what passes are modelled, and so is which gradients are there before all of them are. The values sum
    to `peak.total_bytes`; what is exact is a lower bound.
    """
    own = shares(inventory, plans)
    where = int(np.argmax(own.pp_stage[0] == peak.pp_stage))
    held: dict[Basis, int] = dict.fromkeys(BASES, 0)
    for buffer in inventory.buffers:
        late = buffer.row.category == "gradients" and peak.to_come_bytes != 0
        hosted = on_host(buffer, inventory.setting.offload_moves)
        if late or hosted or buffer.row.passing or not plan_mask(plans, buffer)[0]:
            continue
        alive = alive_at(buffer, peak.instant, plans)
        if alive is not None and np.any(alive):
            held[buffer.row.basis] += int(buffer_bytes(own, buffer)[0, where])
    held["calibrated"] += inventory.setting.profile.memory.workspace_bytes
    held["modelled"] += peak.total_bytes - sum(held.values())
    return {basis: amount for basis, amount in held.items() if amount}
