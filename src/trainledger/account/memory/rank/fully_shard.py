"""FSDP2, and replicas that it keeps, as a step goes on: what is gathered, reduced and kept, in their own order.

[torch: distributed/fsdp/_fully_shard/_fsdp_param_group.py, _fsdp_collectives.py, _fsdp_state.py]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from trainledger.account.memory.rank.tally import Tally
from trainledger.account.memory.rank.units import DataParallel, Unit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Knobs:
    """forward_keeps, backward_keeps: a unit stays gathered after its forward, its backward.

    every     gradients are reduced after every micro-batch
    replicas  shards are summed over replicas
    """

    forward_keeps: bool
    backward_keeps: bool
    every: bool
    replicas: bool


class FullyShard(DataParallel):
    """Units in the order in which they run.

    gathered, coming  units that are whole; outputs of all-gathers on their way, in bytes
    held_output       of the last all-gather of a forward, which stays until the next has been copied
    reducing          what the last reduction took, which stays until the next
    summed            shards that replicas have summed and that were added to others since
    ran               in the order in which they ran forward: backward, the one before is gathered ahead
    sharded           units whose reduced gradients are there
    """

    def __init__(self, tally: Tally, units: Sequence[Unit], knobs: Knobs) -> None:
        super().__init__(tally)
        self.units = tuple(units)
        self.knobs = knobs
        self.sync = True
        self.gathered: set[str] = set()
        self.coming: dict[str, int] = {}
        self.held_output = 0
        self.reducing = self.summed = 0
        self.ran: list[Unit] = []
        self.sharded: set[str] = set()

    def micro_batch(self, *, last: bool) -> None:
        """A micro-batch begins; only some reduce what they give."""
        self.sync = last or self.knobs.every
        self.ran = []

    def enter(self, unit: Unit) -> None:
        """Its weights are gathered; then the output of the all-gather before is let go of."""
        if unit.name in self.gathered:
            return
        self._ask(unit)
        output = self._unpack(unit)
        self.tally.drop(self.held_output)
        self.held_output = output

    def leave(self, unit: Unit) -> None:
        """Its weights go, unless they stay."""
        if not self.knobs.forward_keeps:
            self._shard(unit)
        self.ran.append(unit)

    def turn(self) -> None:
        """The last output of an all-gather is let go of."""
        self.tally.drop(self.held_output)
        self.held_output = 0

    def accumulates(self, unit: Unit) -> bool:
        """Only gradients in the dtype of reductions are added where they lie."""
        return unit.fresh == unit.widened and unit.name in self.gradients

    def start(self, unit: Unit) -> None:
        """Its weights are gathered, and those of the unit that ran before it are asked for."""
        if unit.name not in self.gathered:
            self._ask(unit)
            self.tally.drop(self._unpack(unit))
        index = self.ran.index(unit)
        if index:
            self._ask(self.ran[index - 1])

    def again(self, unit: Unit) -> None:
        """As forward; but it stays gathered."""
        self.enter(unit)

    def hand_over(self, unit: Unit) -> None:
        """Its gradients are kept or reduced, unless only the end of the backward tells that all are there."""
        if not unit.whole_pass:
            self._hand_over(unit)

    def finish(self) -> None:
        """Units that had no end of their own end, and the last reduction is over."""
        for unit in self.units:
            if unit.whole_pass and unit in self.ran:
                self._hand_over(unit)
        self.tally.drop(self.reducing + self.summed)
        self.reducing = self.summed = 0

    def ask_all(self) -> None:
        """All-gathers of all units are on their way."""
        for unit in self.units:
            self._ask(unit)

    def wait_all(self) -> None:
        """What was asked for is copied, unit by unit."""
        for unit in self.units:
            if unit.name in self.coming:
                self.tally.drop(self._unpack(unit))

    def reduce_all(self) -> None:
        """Every unit drops its weights and reduces what it has added up."""
        for unit in self.units:
            self._shard(unit)
            self.tally.drop(self.reducing)
            self._reduce(unit, self.gradients.pop(unit.name))
        self.tally.drop(self.reducing)
        self.reducing = 0

    def _ask(self, unit: Unit) -> None:
        """Start to gather: the output of the all-gather, into which every rank's shard is copied."""
        if unit.name in self.gathered or unit.name in self.coming:
            return
        self.coming[unit.name] = 0 if unit.alone else unit.whole
        if not unit.alone:
            self.tally.add(f"all-gather of {unit.name}", unit.whole)
            self.tally.reach(f"all-gather of {unit.name}, shard cast", unit.cast)

    def _unpack(self, unit: Unit) -> int:
        """Copy what was gathered into the weights; the all-gather's output is whoever calls' to drop."""
        self.tally.add(f"weights of {unit.name} gathered", unit.whole)
        if unit.alone:
            self.tally.reach(f"weights of {unit.name} cast", unit.largest)
        self.gathered.add(unit.name)
        return self.coming.pop(unit.name)

    def _shard(self, unit: Unit) -> None:
        if unit.name in self.gathered:
            self.gathered.remove(unit.name)
            self.tally.drop(unit.whole)

    def _hand_over(self, unit: Unit) -> None:
        """After its backward: gradients are widened and kept, or reduced."""
        cast = unit.fresh != unit.widened
        before = self.gradients.pop(unit.name, 0)
        if before and cast:  # added into the wide ones, in place
            self.tally.drop(unit.fresh)
        gradients = before or unit.fresh
        if not self.knobs.backward_keeps:
            self._shard(unit)
        if not self.sync:
            if cast and not before:
                self.tally.reach(f"gradients of {unit.name} widened", unit.widest)
                self.tally.add(f"gradients of {unit.name} widened", unit.widened - unit.fresh)
                gradients = unit.widened
            self.gradients[unit.name] = gradients
            return
        self.tally.drop(self.reducing)
        self._reduce(unit, gradients)

    def _reduce(self, unit: Unit, gradients: int) -> None:
        what = f"reduction of {unit.name}"
        last = 0 if unit.alone else unit.last * gradients // unit.fresh
        with self.tally.during(f"{what}, joined", unit.joined):
            self.tally.add(what, unit.reduced)
        self.tally.drop(gradients - last)
        self.reducing = unit.reduced
        self.tally.add(what, unit.shard)
        self.tally.reach(f"{what}, divided", unit.divided)
        self.tally.drop(last)
        if unit.name in self.sharded:  # added to what is there; what replicas have summed is held until the end
            self.tally.drop(0 if self.knobs.replicas else unit.shard)
            self.summed += unit.shard if self.knobs.replicas else 0
        self.sharded.add(unit.name)
