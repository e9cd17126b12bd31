"""What passes under PyTorch's FSDP of one flat parameter for each wrapped module, as accelerate wraps a model.

Every block is a unit, and the embedding with all that follows the last block the root, which is one more. A unit is
gathered into one tensor that its weights are views of: nothing is copied out. The root stays gathered from the first
forward to the end of the backward, blocks do under SHARD_GRAD_OP; backward, the block before is gathered as one runs.

Autograd gives each weight a gradient and puts them side by side in a new flat one. Then the unit drops its weights, and
the flat gradient is cast where reductions have another dtype, reduced, and its shard cast to the dtype of the weights.
Under no_sync it waits instead, whole, and the next one is added to it. [fsdp1]
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from trainledger.account.memory.engines.fsdp2 import Fsdp2
from trainledger.account.memory.engines.passing import Part
from trainledger.account.shares import flat_unit_bytes, flat_unit_elements
from trainledger.arrays import IntArray
from trainledger.dtypes import bytes_of
from trainledger.inventory.tensors import BoolArray


class Fsdp1(Fsdp2):
    """Bytes [plans, rows] of what passes; the root's flat parameter is counted at the slot of the embedding."""

    keeps_ends = True
    holds = "flat parameters gathered now and next, and the gradients of one on their way to be reduced"
    cites = ("fsdp1",)

    @property
    def together(self) -> bool:
        """Both ends are the root."""
        return True

    @cached_property
    def drops(self) -> IntArray:
        """[plans, 1]: 1 where a block drops its weights after its forward: FULL_SHARD."""
        return (self.own.plans.zero_stage == 3).astype(np.int64)[:, None]

    @cached_property
    def late(self) -> BoolArray:
        """[plans, 1]: nowhere, for there are no pipelines."""
        return np.zeros((len(self.own.plans), 1), dtype=np.bool_)

    @cached_property
    def adds_up(self) -> BoolArray:
        """[plans, 1]: where no_sync keeps the gradients of several micro-batches whole."""
        no_sync = self.inventory.setting.profile.memory.no_sync
        return (self.own.plans.num_microbatches > 1)[:, None] & no_sync

    @property
    def _anew(self) -> IntArray:
        """[plans, 1]: 1 where a step's last micro-batch makes the shards, 0 where an earlier one left them."""
        return ((self.own.plans.num_microbatches == 1)[:, None] | self.adds_up).astype(np.int64)

    @cached_property
    def flat(self) -> IntArray:
        """[plans, slots]: elements of each flat parameter that trains; of adapters all together."""
        return flat_unit_elements(self.own, self.own.table.trainable)

    @cached_property
    def whole(self) -> IntArray:
        """[plans, slots]: a flat parameter as it is gathered, adapters with what is frozen beside them."""
        return flat_unit_bytes(self.own, self.inventory.setting.dtype("gathered"))

    @cached_property
    def summed(self) -> IntArray:
        """[plans, slots]: its gradient, which is flat and whole."""
        return bytes_of(self.flat, self.inventory.setting.dtype("gathered"))

    @cached_property
    def reduced(self) -> IntArray:
        """[plans, slots]: a copy of its gradient in the dtype of reductions, where that is another."""
        setting = self.inventory.setting
        casts = setting.dtype("reduce") != setting.dtype("gathered")
        return bytes_of(self.flat, setting.dtype("reduce")) * casts

    @cached_property
    def _over_ranks(self) -> IntArray:
        """[plans, slots]: elements of a shard."""
        return self.flat // self.own.dense[:, None]

    @cached_property
    def shards(self) -> IntArray:
        """[plans, slots]: this rank's part of its gradient, as kept on the card."""
        return bytes_of(self._over_ranks, self.inventory.setting.dtype("weight")) * (not self.away)

    @cached_property
    def given(self) -> IntArray:
        """[plans, slots]: what a reduction gives, beside what it is cast to, where it is."""
        setting = self.inventory.setting
        given, kept = setting.dtype("reduce"), setting.dtype("weight")
        return bytes_of(self._over_ranks, given) + bytes_of(self._over_ranks, kept) * (given != kept)

    def _stays(self) -> IntArray:
        """[plans, rows]: what is gathered at the turn from forward to backward."""
        return np.where(self.drops == 1, self.ends(self.whole), self.everything)

    def forward(self, slot: int) -> IntArray:
        """While the last layer of a slot runs forward."""
        if slot in (self.own.table.at.embedding, self.own.table.at.final):
            return self._stays()
        return self._stays() + self.of(self.whole, slot) * self.drops

    def backward(self, slot: int, *, first: bool) -> IntArray:
        """While a layer runs backward; the loss's backward begins with the gathering of the last block."""
        at = self.own.table.at
        if slot == at.final:
            return self._stays() + self.of(self.whole, self.block_of(-1)) * self.drops
        if slot == at.embedding:
            return self.ends(self.whole) + self._waiting + self._summed(slot) - self._missing(slot, first=False)
        standing = np.where((self.drops == 1) | (not first), self._root_and(slot), self.everything)
        more = self.none if first else self._summed(slot)
        return standing + self._early(slot, first=first) + self._waiting + more - self._missing(slot, first=first)

    def second(self, slot: int) -> IntArray:
        """While a block runs backward after another, whose shard is there instead of its whole gradient."""
        standing = np.where(self.drops == 1, self._root_and(slot), self.everything - self.of(self.whole, slot))
        there = self.of(self.shards, slot) * self._anew - self.of(self.summed, slot) * self.adds_up
        return standing + self._early(slot, first=True) + self._waiting + there

    def handed(self, slot: int, *, first: bool) -> IntArray:
        """As a unit's gradients are put side by side, and as the flat one is reduced when its weights are gone."""
        at, flat = self.own.table.at, self.summed
        if slot == at.final:
            return self.backward(slot, first=first) + self._waiting
        if slot == at.embedding:
            joined = self.ends(self.whole) + self.ends(self.gradients) + self.ends(flat) + self._summed(slot)
            reduced = self.ends(flat * self._incoming + self.reduced + self.given)
            return np.maximum(joined, reduced) - self._missing(slot, first=False)
        unit = self.of(flat, slot)
        standing = np.where((self.drops == 1) | (not first), self._root_and(slot), self.everything)
        whole = self.none if first else self._summed(slot)
        joined = standing + unit + self.of(self.gradients, slot) + whole
        # of several micro-batches the states count the sum at the loss, to which this one has been added by now
        sums = unit * np.where(self.adds_up & first, 0, 1) + whole - unit * (self.adds_up & (not first))
        more = unit * (self._incoming - 1)
        reduced = standing - self.of(self.whole, slot) + sums + more + self.of(self.reduced + self.given, slot)
        beside = self._next(slot, first=first) + self._waiting - self._missing(slot, first=first)
        return np.maximum(joined, reduced) + beside

    def to_come(self, part: Part, slot: int, *, first: bool) -> IntArray:
        """What `backward` and `handed` take off again."""
        if part in ("forward", "none", "end") or slot == self.own.table.at.final:
            return self.none
        return self._missing(slot, first=first or part == "second")

    @property
    def _incoming(self) -> IntArray:
        """[plans, 1]: flat gradients while one is reduced: of several micro-batches the sum and the last of them."""
        return 1 + self.adds_up.astype(np.int64)

    def _root_and(self, slot: int) -> IntArray:
        """[plans, rows]: the root and a block, gathered."""
        return self.ends(self.whole) + self.of(self.whole, slot)

    def _summed(self, slot: int) -> IntArray:
        """[plans, rows]: whole gradients of earlier micro-batches of a block and the root, no others being left."""
        root = self.ends(self.summed)
        both = root if slot == self.own.table.at.embedding else root + self.of(self.summed, slot)
        return both * self.adds_up

    def _next(self, slot: int, *, first: bool) -> IntArray:
        """[plans, rows]: the block gathered meanwhile; none before the last, which has one shard more beside it."""
        block = self.of(self.whole, slot)
        if not first:
            block = np.maximum(block - self.of(self.shards, slot) * self._anew, 0)
        return np.where(self.own.counts[:, :, slot] > 1, block, 0) * self.drops

    def _early(self, slot: int, *, first: bool) -> IntArray:
        """[plans, rows]: the same while this block runs; the adapter that ran first asks for it, as it runs last."""
        return self._next(slot, first=first) * self.asks_early

    @property
    def asks_early(self) -> bool:
        """Whether what ran before a block is another block, and no adapter inside it."""
        return bool(self.own.table.trainable.all())

    def _missing(self, slot: int, *, first: bool) -> IntArray:
        """[plans, rows]: shards that the states count at the end of the backward and that are to come."""
        if first:
            return self.none
        root = self.ends(self.shards)
        both = root if slot == self.own.table.at.embedding else root + self.of(self.shards, slot)
        return both * self._anew
