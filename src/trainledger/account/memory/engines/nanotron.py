"""What passes and what stays in nanotron beside its states: gradients of a micro-batch, and tables of rotation.

Gradients in 16 bits wait for the end of a micro-batch's backward, when they are added to the fp32 buffer that the
states count. Every layer has its own table of fp32 pairs, and flash-attn's cosines and sines in 16 bits.
[nanotron: src/nanotron/optim/gradient_accumulator.py, src/nanotron/models/llama.py]
Fourteen measured peaks bear it out. [nanotron-bench]
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from trainledger.account.memory.engines.passing import Part, Passing
from trainledger.arrays import IntArray, ints
from trainledger.dtypes import bytes_of


class WaitingGradients(Passing):
    """As each layer runs backward its gradients join those that wait; a running layer's own are on its tape."""

    holds = "gradients of a micro-batch that wait to be added up, and tables of rotation"
    cites = ("nanotron",)

    def at(self, part: Part, slot: int, first: bool) -> IntArray:
        """Bytes [plans, rows]."""
        return super().at(part, slot, first) + self.tables

    @cached_property
    def tables(self) -> IntArray:
        """[plans, rows]: of all layers of a stage."""
        setting = self.inventory.setting
        positions, total = setting.model.max_positions or setting.workload.seq, self.none
        for slot, block in self.inventory.layers:
            if block.attention is not None:
                pairs = bytes_of(ints(positions * block.attention.qk_head_dim), "fp32")
                turns = bytes_of(ints(setting.workload.seq * block.attention.qk_head_dim), setting.recipe.activation)
                total = total + self.own.counts[:, :, slot] * (pairs + turns)
        return total

    @cached_property
    def each(self) -> IntArray:
        """[plans, slots]: gradients of one layer, or of an end."""
        own = self.own
        elements = own.shapes.numel * own.shapes.copies * own.table.trainable
        sums = np.zeros((len(elements), own.table.at.count), dtype=np.int64)
        sums[:, own.table.filled] = own.table.by_slot(bytes_of(elements, self.inventory.setting.recipe.weight))
        return sums

    @cached_property
    def output(self) -> IntArray:
        """[plans, rows]: of what follows the last block; a tied output layer gives the table's gradient."""
        at, counts = self.own.table.at, self.own.counts
        given = self.each[:, None, at.final] * (counts[:, :, at.final] > 0)
        if not self.inventory.setting.model.tied:
            return given
        table = np.maximum(self.each[:, None, at.embedding], self.each[:, None, at.copy])
        return given + table * (counts[:, :, at.final] > 0)

    @cached_property
    def kinds(self) -> list[int]:
        """Slots of the kinds of layers, in the order of the model."""
        return [slot for slot, _ in self.inventory.layers]

    def backward(self, slot: int, *, first: bool) -> IntArray:
        """What waits while a layer runs backward."""
        at = self.own.table.at
        if slot == at.final:
            return self.none
        if slot == at.embedding:
            return self.output + self._layers(-1, first=False)
        return self.output + self._layers(self.kinds.index(slot), first=first)

    def handed(self, slot: int, *, first: bool) -> IntArray:
        """What waits when it has: its own too; a tied table has one gradient for both its uses."""
        at = self.own.table.at
        own = self.each[:, None, slot] * (self.own.counts[:, :, slot] > 0)
        if slot == at.embedding and self.inventory.setting.model.tied:
            own = np.where(self.own.counts[:, :, at.final] > 0, 0, own)
        return self.backward(slot, first=first) + own

    def _layers(self, index: int, *, first: bool) -> IntArray:
        """[plans, rows]: of the layers that have run backward before one of a kind does; -1: before the embedding."""
        ran = (
            self.own.counts[:, :, slot] if index < 0 else self._ran(index, other, first=first)
            for other, slot in enumerate(self.kinds)
        )
        return sum((self.each[:, None, slot] * times for slot, times in zip(self.kinds, ran, strict=True)), self.none)

    def _ran(self, index: int, other: int, *, first: bool) -> IntArray:
        """[plans, rows]: layers of the other kind that run backward before the first, or the last, of a kind does."""
        earlier, later = self._order
        if other == index:
            return self.none if first else np.maximum(self.own.counts[:, :, self.kinds[other]] - 1, 0)
        return (
            later[:, :, index, other]
            if first
            else self.own.counts[:, :, self.kinds[other]] - earlier[:, :, index, other]
        )

    @cached_property
    def _order(self) -> tuple[IntArray, IntArray]:
        return self.inventory.stage_order(self.own.plans)
