"""What passes under PyTorch's FSDP2: gathered units, gradients of a unit, and the input of its reduction.

A unit is an embedding, a block, or what follows the last one; releases differ in which of them are one. Its weights are
gathered into one tensor and copied out of it into tensors of their own. Forward, the gathered tensor stays until the
next unit has copied; backward, the one before is gathered while a unit runs. When a unit has run backward: it drops its
weights, the reduction before lets go of its input, the unit's own input is made in the dtype of reductions beside its
gradients, they are dropped, and the shard is made. [fsdp2-units]

Gradients of a rank's own shards are rows of the states table; those that are not there yet are taken off again.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from trainledger.account.memory.engines.passing import Part
from trainledger.account.memory.engines.unit_sizes import UnitSizes
from trainledger.arrays import IntArray
from trainledger.inventory.tensors import BoolArray


class Fsdp2(UnitSizes):
    """Bytes [plans, rows] of what passes."""

    overlaps = True
    keeps_ends = True
    """In a run the unit of the output layer is gathered while the loss is computed."""
    holds = "units gathered now and next, gradients of a unit and the input of its reduction"
    cites = ("fsdp2-units",)

    @cached_property
    def drops(self) -> IntArray:
        """[plans, 1]: 1 where a unit drops its weights after its forward."""
        plans = self.own.plans
        return ((plans.zero_stage != 2) & (plans.pp == 1)).astype(np.int64)[:, None]

    @cached_property
    def late(self) -> BoolArray:
        """[plans, 1]: where units are reduced after the last micro-batch, all of them."""
        return (self.own.plans.pp > 1)[:, None]

    @cached_property
    def adds_up(self) -> BoolArray:
        """[plans, 1]: where gradients of several micro-batches are added up before they are reduced."""
        return self.late

    @cached_property
    def _alone(self) -> IntArray:
        """[plans, 1]: 1 where a stage gathers for itself; in a pipeline the states have what it keeps gathered."""
        return (self.own.plans.pp == 1).astype(np.int64)[:, None]

    @cached_property
    def _sent(self) -> IntArray:
        """[plans, 1]: 1 where weights travel: a unit that one rank has needs no tensor to gather into."""
        return ((self.own.dense > 1) & (self.own.plans.zero_stage > 0)).astype(np.int64)[:, None]

    @cached_property
    def _left(self) -> IntArray:
        """[plans, rows]: of those that are never dropped what is left when the output layer has run backward."""
        return self.everything if self.together else self.everything - self.after(self.weights)

    def _stays(self) -> IntArray:
        """[plans, rows]: what is gathered from its forward to its backward, at the turn between the two."""
        profile = self.inventory.setting.profile
        if self.together:
            kept = self.ends(self.weights)
        else:
            kept = self.after(self.weights) if profile.traffic.final_unit_kept else self.none
        if profile.memory.last_block_kept:
            kept = kept + self.of(self.weights, self.block_of(-1))
        return np.where(self.drops == 1, kept, self.everything * self._alone)

    def forward(self, slot: int) -> IntArray:
        """While the last layer of a slot runs forward: its weights twice, and what stays gathered."""
        if slot in (self.own.table.at.final, self.own.table.at.mtp):
            return self._stays()
        unit = self.of(self.weights, slot)
        ends = self.ends(self.weights) if self.together else self.none
        gathered = unit * (self._sent + self.drops)
        return np.where(self.drops == 1, ends, self.everything * self._alone) + gathered * self._alone

    def backward(self, slot: int, *, first: bool) -> IntArray:
        """While a layer runs backward: its weights, those of the next, and the reduction of the one before."""
        at, unit = self.own.table.at, self.of(self.weights, slot)
        if slot == at.final:
            return self._stays()
        ends = self.ends(self.weights) if self.together else self.none
        if slot == at.embedding:
            before = self.of(self.reduced, self.block_of(0))
            own = self.none if self.together else unit
            return (ends + own + before + self._waiting) * self._alone - self._missing(slot, first=False)
        dropped = self.drops == 1
        standing = np.where(dropped, unit + ends, self._left if first else unit + ends)
        beside = self._next(slot, first=first) + self._reduced_before(slot, first=first) + self._waiting
        return (standing + beside) * self._alone - self._missing(slot, first=first)

    def second(self, slot: int) -> IntArray:
        """While a block runs backward after another: its weights, those of the next, and the other's reduction."""
        own, unit = self.own, self.of(self.weights, slot)
        ends = self.ends(self.weights) if self.together else self.none
        standing = np.where(self.drops == 1, unit + ends, self._left - unit)
        beside = self._next(slot, first=True) + self.of(self.reduced, slot) + self._waiting
        there = self.of(self.shards, slot) * ((own.plans.num_microbatches == 1) & (own.plans.pp == 1))[:, None]
        return (standing + beside) * self._alone + there - self._missing(slot, first=True)

    def end(self) -> IntArray:
        """In a pipeline units are reduced after the last micro-batch, one after the other: as the first one is."""
        own, at = self.own, self.own.table.at
        change = self.reduced - self.weights
        first = np.where(
            own.counts[:, :, at.embedding] > 0,
            self.of(change, at.embedding),
            np.maximum.reduce([self.of(change, slot) for slot, _ in self.inventory.layers] or [self.none]),
        )
        return (first - self._shards) * self.late

    def handed(self, slot: int, *, first: bool) -> IntArray:
        """As a unit is reduced: its gradients and the input of their reduction, beside the next unit's weights."""
        at = self.own.table.at
        both = np.where(self._alone == 1, self.handing, self.gradients)
        missing = self._missing(slot, first=first)
        if slot == at.embedding:
            return (self.ends(both) if self.together else self.of(both, slot)) - missing
        if slot == at.final:
            return self._stays() if self.together else self._after_output(both)
        ends = self.ends(self.weights) if self.together else self.none
        standing = np.where(self.drops == 1, ends, self._left - self.of(self.weights, slot) if first else ends)
        beside = self._next(slot, first=first) + self._waiting
        return self.of(both, slot) + (standing + beside) * self._alone - missing

    @cached_property
    def handing(self) -> IntArray:
        """[plans, slots]: a unit's gradients, or the shard that is made when they are gone, and the reduction's input.

        Where few ranks share it the shard is the larger of the two.
        """
        return self.reduced + np.maximum(self.gradients, self.shards)

    def to_come(self, part: Part, slot: int, *, first: bool) -> IntArray:
        """What `backward`, `second`, `handed` and `end` take off again."""
        if part == "end":
            return self._shards * self.late
        if part in ("forward", "none") or slot == self.own.table.at.final:
            return self.none
        return self._missing(slot, first=first or part == "second")

    def _after_output(self, both: IntArray) -> IntArray:
        """[plans, rows]: when the unit of the output layer is handed over, the last block being gathered."""
        last = self.of(self.weights, self.block_of(-1))
        standing = np.where(self.drops == 1, last * self._sent, self.everything - self.after(self.weights))
        return self.after(both) + standing * self._alone

    def _next(self, slot: int, *, first: bool) -> IntArray:
        """[plans, rows]: the unit that is gathered while this one runs backward.

        Of the last block that is the embedding; of the one before it is a block, and one shard less is there.
        """
        at, plans = self.own.table.at, self.own.plans
        coming = self.none if self.together else self.of(self.weights, at.embedding)
        block = self.of(self.weights, slot)
        if not first:
            block = np.maximum(block - self.of(self.shards, slot) * (plans.num_microbatches == 1)[:, None], coming)
        coming = np.where(self.own.counts[:, :, slot] > 1, block, coming)
        return coming * self.drops * self._sent

    def _reduced_before(self, slot: int, *, first: bool) -> IntArray:
        """[plans, rows]: the input of the reduction before, which this unit's own lets go of."""
        after = self.none if self.together else self.after(self.reduced)
        layers = self.own.counts[:, :, slot]
        return after if first else np.where(layers > 1, self.of(self.reduced, slot), after)

    @cached_property
    def _waiting(self) -> IntArray:
        """[plans, rows]: gradients of the output layer that wait for the embedding's, with which they are reduced."""
        if not self.together:
            return self.none
        return self.ends(self.gradients) if self.inventory.setting.model.tied else self.after(self.gradients)

    def _missing(self, slot: int, *, first: bool) -> IntArray:
        """[plans, rows]: shards of gradients that the states count at the end of the backward and that are to come.

        Less those that are there although the states count none at the loss: the output layer's, once it is reduced.
        Where micro-batches add up they are all there; in a pipeline none is before the last of them has run.
        """
        plans, own = self.own.plans, self.own
        if first:
            there = self.none if self.together or slot == own.table.at.final else self.after(self.shards)
            return -there * ((plans.num_microbatches == 1) & (plans.pp == 1))[:, None]
        to_come = self.ends(self.shards) if self.together else self.of(self.shards, own.table.at.embedding)
        if slot != own.table.at.embedding:
            to_come = to_come + self.of(self.shards, slot)
        one = (plans.num_microbatches == 1)[:, None]
        return np.where(self.late, self._shards, to_come * one)

    @cached_property
    def _shards(self) -> IntArray:
        """[plans, rows]: gradients of all that a rank owns."""
        return np.einsum("us,urs->ur", self.shards, self.own.counts)
