"""How large the units of FSDP2 are: gathered, as gradients, as the input of a reduction, and as a shard of it."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from trainledger.account.memory.engines.passing import Passing
from trainledger.arrays import IntArray, round_up
from trainledger.dtypes import bytes_of
from trainledger.inventory.buffers import gathered_bytes
from trainledger.inventory.tensors import BoolArray


class UnitSizes(Passing):
    """Bytes of a unit are [plans, slots]; of what a stage holds of it, [plans, rows]."""

    @cached_property
    def _over(self) -> IntArray:
        """[plans, T]: ranks that share a tensor; replicas are units that one rank has whole. [torch-replicate]"""
        own = self.own
        shared = np.where(own.table.expert, own.expert[:, None], own.dense[:, None])
        return np.where(own.plans.zero_stage[:, None] == 0, 1, shared)

    @cached_property
    def elements(self) -> IntArray:
        """[plans, T]: of each tensor as it is gathered, its first dimension padded to a multiple of the ranks."""
        own, shapes = self.own, self.own.shapes
        rows = np.where(own.table.expert & own.stacked, shapes.rows, round_up(shapes.rows, self._over))
        return rows * shapes.rest * shapes.copies

    def _by_slot(self, per_tensor: IntArray) -> IntArray:
        """[plans, slots]."""
        sums = np.zeros((len(per_tensor), self.own.table.at.count), dtype=np.int64)
        sums[:, self.own.table.filled] = self.own.table.by_slot(per_tensor)
        return sums

    @cached_property
    def whole(self) -> IntArray:
        """[plans, slots]: a unit's weights as they are multiplied; the gathered tensor is as large."""
        return self._by_slot(gathered_bytes(self.own.table, self.elements, self.inventory.setting.dtype("gathered")))

    @cached_property
    def weights(self) -> IntArray:
        """[plans, slots]: those of units that are not among the states."""
        return self.whole

    @cached_property
    def gradients(self) -> IntArray:
        """[plans, slots]: what its backward gives, in the dtype of its activations."""
        return self.fresh(self.own.table.trainable)

    def fresh(self, tensors: BoolArray) -> IntArray:
        """[plans, slots]: gradients of some tensors as a backward gives them."""
        elements = self.own.shapes.numel * self.own.shapes.copies * (self.own.table.trainable & tensors)
        return self._by_slot(bytes_of(elements, self.inventory.setting.recipe.activation))

    @cached_property
    def reduced(self) -> IntArray:
        """[plans, slots]: the input of its reduction."""
        return self.widened("reduce")

    def widened(self, role: str) -> IntArray:
        """[plans, slots]: gradients of a unit, padded, in the dtype of a role."""
        elements = self.elements * self.own.table.trainable
        return self._by_slot(bytes_of(elements, self.inventory.setting.dtype(role)))

    @cached_property
    def shards(self) -> IntArray:
        """[plans, slots]: this rank's part of its gradients, as kept on the card."""
        elements = self.elements * self.own.table.trainable // self._over
        return self._by_slot(bytes_of(elements, self.inventory.setting.dtype("grad"))) * (not self.away)

    @property
    def away(self) -> bool:
        """Whether gradients are copied to the host as each is reduced, where weights and optimizer are too."""
        return any("gradients" in moved for moved in self.inventory.setting.offload_moves)

    @cached_property
    def _holds(self) -> BoolArray:
        """[plans, rows, slots]: whether a stage has any of a slot."""
        return self.own.counts > 0

    def of(self, unit: IntArray, slot: int) -> IntArray:
        """[plans, rows]: bytes of one unit, on the stages that hold it."""
        return unit[:, slot, None] * self._holds[:, :, slot]

    def after(self, unit: IntArray) -> IntArray:
        """[plans, rows]: of what follows the last block, a second copy of the embedding included."""
        at = self.own.table.at
        return self.of(unit, at.final) + self.of(unit, at.copy)

    def ends(self, unit: IntArray) -> IntArray:
        """[plans, rows]: of the embedding and what follows the last block."""
        return self.of(unit, self.own.table.at.embedding) + self.after(unit)

    def block_of(self, layer: int) -> int:
        """The slot of the first layer of the model (0), or of its last (-1)."""
        layer %= self.inventory.setting.model.num_layers
        blocks = enumerate(self.inventory.setting.model.blocks, start=1)
        return next(slot for slot, block in blocks if layer in block.layers)

    @property
    def together(self) -> bool:
        """Whether those are one unit: by the release, or because they share a weight. [torchtitan-reshard]"""
        setting = self.inventory.setting
        return setting.profile.memory.ends_together or setting.model.tied

    @cached_property
    def everything(self) -> IntArray:
        """[plans, rows]: weights of all units of a stage."""
        return np.einsum("us,urs->ur", self.weights, self.own.counts)
