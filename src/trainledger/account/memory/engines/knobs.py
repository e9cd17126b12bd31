"""FSDP2 as this package's program sets it: by the knobs of each ZeRO stage. [fsdp2-knobs]

Under ZeRO 3 units are gathered and dropped; under 1 and 2, in a pipeline and as replicas they stay gathered, which the
states count. Where nothing is wrapped in units gradients alone pass.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from trainledger.account.memory.engines.fsdp2 import Fsdp2
from trainledger.arrays import IntArray
from trainledger.inventory.tensors import BoolArray
from trainledger.plans.sharding import wrapped


class Knobs(Fsdp2):
    """Bytes [plans, rows] of what passes."""

    cites = ("fsdp2-units", "fsdp2-knobs")
    keeps_ends = False

    @cached_property
    def wraps(self) -> BoolArray:
        """[plans, 1]: where units wrap the model."""
        plans = self.own.plans
        return (wrapped(plans, "unit") | self.inventory.setting.casts)[:, None]

    @cached_property
    def drops(self) -> IntArray:
        """[plans, 1]: 1 where a unit drops its weights after its forward."""
        plans = self.own.plans
        return (((plans.zero_stage == 3) & (plans.pp == 1))[:, None] & self.wraps).astype(np.int64)

    @cached_property
    def late(self) -> BoolArray:
        """[plans, 1]: where units are reduced after the last micro-batch, all of them."""
        return (self.own.plans.pp > 1)[:, None] & self.wraps

    @cached_property
    def adds_up(self) -> BoolArray:
        """[plans, 1]: where gradients of several micro-batches are added up before they are reduced."""
        plans = self.own.plans
        return self.late | (((plans.zero_stage < 2) & (plans.num_microbatches > 1))[:, None] & self.wraps)

    @cached_property
    def weights(self) -> IntArray:
        """[plans, slots]: those of units that come and go."""
        return self.whole * self.drops

    @cached_property
    def reduced(self) -> IntArray:
        """[plans, slots]: the input of a unit's reduction."""
        return self.widened("reduce") * self.wraps

    def _stays(self) -> IntArray:
        """[plans, rows]: every unit is dropped at its end, that of both ends of a model too."""
        return self.none

    @cached_property
    def handing(self) -> IntArray:
        """[plans, slots]: as FSDP2's; but a loop variable holds the last gradient until the shard is made."""
        return self.reduced + np.maximum(self.gradients, self.shards + self.last)

    @cached_property
    def last(self) -> IntArray:
        """[plans, slots]: the gradient of the last tensor of a unit."""
        slots = self.own.table.slots
        return self.fresh(np.append(slots[1:] != slots[:-1], True))

    def backward(self, slot: int, *, first: bool) -> IntArray:
        """While a layer runs backward."""
        return super().backward(slot, first=first) + self._standing(first=first)

    def handed(self, slot: int, *, first: bool) -> IntArray:
        """As a unit is reduced, or its gradients are added to others, which the states of the loss count."""
        if slot == self.own.table.at.final and self.together:
            gathered = self.ends(self.weights) + self.of(self.weights, self.block_of(-1)) * self._sent
            return (gathered + self._waiting) * self._alone
        there = self.of(np.maximum(self.gradients, self.shards), slot) * (self.adds_up & ~self.late)
        return super().handed(slot, first=first) + self._standing(first=first) - (there if first else self.none)

    def end(self) -> IntArray:
        """In a pipeline the first unit that is reduced drops its weights; the others are as they were."""
        at = self.own.table.at
        slots = [at.embedding, *(slot for slot, _ in self.inventory.layers)]
        gone = np.maximum.reduce([self.of(self.reduced - self.whole, slot) for slot in slots])
        return (self._piled + gone - self._shards) * self.late

    def _standing(self, *, first: bool) -> IntArray:
        """[plans, rows]: what the states of a pipeline count at the loss alone, and which is there until its end."""
        return self.none if first else self._piled * self.late

    @cached_property
    def _piled(self) -> IntArray:
        """[plans, rows]: all that is gathered, and gradients as they are added up."""
        several = (self.own.plans.num_microbatches > 1)[:, None]
        return np.einsum("us,urs->ur", self.whole + self.widened("unsharded_grad") * several, self.own.counts)
