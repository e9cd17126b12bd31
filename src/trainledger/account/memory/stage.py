"""What one rank of each pipeline stage has allocated at each place of a step, and the place where that is most.

A place adds up states, activations (active.py) and what passes (engines/passing.py). Each depends on few columns of a
plan, so each is worked out per distinct combination of its own, and plans look them up.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from trainledger.account.memory.active import COLUMNS, Active, Place, active
from trainledger.account.memory.beside import beside_bytes
from trainledger.account.memory.engines import passing_of
from trainledger.account.memory.engines.passing import Passing
from trainledger.account.states import StateAccount, account_of, distinct_shares, joined
from trainledger.arrays import IntArray, stacked
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Plans
from trainledger.profiles.profile import CATEGORIES, Instant


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageMemory:
    """The places of a step of many plans.

    active, which   activations of distinct plans, and which of them is a plan's
    states          states of distinct plans, with their own index
    passing         [places]: bytes [distinct states, rows]
    passes          what tells them of distinct states, in order
    pp_stage        [plans, rows]
    workspace_bytes  scratch memory of libraries, allocated once and kept
    beside          [plans]: context and communicators
    """

    active: Active
    which: IntArray
    states: StateAccount
    passing: tuple[IntArray, ...]
    passes: tuple[Passing, ...]
    pp_stage: IntArray
    workspace_bytes: int
    beside: IntArray

    @property
    def places(self) -> tuple[Place, ...]:
        """In the order of a step."""
        return self.active.places

    def total(self, index: int) -> IntArray:
        """[plans, rows]: all that is allocated at a place; 0 on stages that lack it."""
        place, rows = self.places[index], self.states.index
        held = (self.states.at(place.states) + self.passing[index] + self.workspace_bytes)[rows]
        whole = held + place.active[self.which]
        return whole if place.here.all() else np.where(place.here[self.which], whole, 0)

    def totals(self, plan: int) -> IntArray:
        """[places, rows]: all that is allocated of one plan; 0 on stages that lack a place."""
        row, acting, held = self.states.index[plan], self.which[plan], self.states.held
        instants: set[Instant] = {place.states for place in self.places}
        states = {i: sum([held[category, i][row] for category in CATEGORIES], self.workspace_bytes) for i in instants}
        whole = np.array([states[place.states] for place in self.places])
        whole += np.array([passing[row] for passing in self.passing])
        whole += np.array([place.active[acting] for place in self.places])
        return whole * np.array([place.here[acting] for place in self.places])

    def to_come(self, index: int) -> IntArray:
        """[distinct states, rows]: gradients that the states of a place count and that are not there yet."""
        place = self.places[index]
        return stacked([each.to_come(place.part, place.slot, first=place.first) for each in self.passes])

    @property
    def saved(self) -> IntArray:
        """[plans, rows]: what all micro-batches in flight keep at the turn from forward to backward."""
        return self.active.saved[self.which]

    @property
    def host(self) -> IntArray:
        """[plans, rows]: states and activations in host memory."""
        return self.states.host[self.states.index] + self.active.host[self.which]

    @property
    def allocated(self) -> IntArray:
        """[plans]: the most that any rank has allocated."""
        most = self.total(0).max(axis=1)
        for index in range(1, len(self.places)):
            np.maximum(most, self.total(index).max(axis=1), out=most)
        return most

    @property
    def device(self) -> IntArray:
        """[plans]: what is allocated and what lies beside it."""
        return self.allocated + self.beside

    def where(self, plan: int = 0) -> tuple[int, int]:
        """(place, row): where a plan holds most; of equals the earliest."""
        totals = self.totals(plan)
        place, row = np.unravel_index(int(totals.argmax()), totals.shape)
        return int(place), int(row)


def stage_memory(inventory: Inventory, plans: Plans) -> StageMemory:
    """Every place of every distinct stage of each plan."""
    return inventory.once("stages", plans, lambda: _stage_memory(inventory, plans))


def _stage_memory(inventory: Inventory, plans: Plans) -> StageMemory:
    distinct, which = plans.distinct(COLUMNS)
    acting = active(inventory, distinct)
    parts, index = distinct_shares(inventory, plans)
    states = joined([account_of(inventory, own, index, with_passing=False) for own in parts])
    passings = tuple(passing_of(inventory, own) for own in parts)
    passes = [_passes(acting.places, passing) for passing in passings]
    return StageMemory(
        active=acting,
        which=which,
        states=states,
        passing=tuple(passes[0] if len(parts) == 1 else map(stacked, zip(*passes, strict=True))),
        passes=passings,
        pp_stage=inventory.stage_counts(plans)[1],
        workspace_bytes=inventory.setting.profile.memory.workspace_bytes,
        beside=beside_bytes(inventory, plans),
    )


def _passes(places: tuple[Place, ...], passing: Passing) -> list[IntArray]:
    """[places]: bytes [plans, rows] of what passes there."""
    return [passing.at(place.part, place.slot, place.first) for place in places]
