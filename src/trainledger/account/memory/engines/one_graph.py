"""What passes where the whole step is one graph of operations: what does under FSDP2, its gradients wider and longer.

They are cast to the dtype of reductions as each comes, and put into one buffer when those of a unit are all there; a
buffer is let go of when the next unit's reduction has begun. [torchtitan-graph-trainer]
"""

from __future__ import annotations

import numpy as np

from trainledger.account.memory.engines.fsdp2 import Fsdp2
from trainledger.arrays import IntArray
from trainledger.dtypes import bytes_of
from trainledger.inventory.tensors import BoolArray


class OneGraph(Fsdp2):
    """Bytes [plans, rows] of what passes."""

    holds = "units gathered now and next, gradients of a unit and the inputs of its reduction and of the one before"
    cites = ("torchtitan-graph-trainer",)

    def fresh(self, tensors: BoolArray) -> IntArray:
        """[plans, slots]: gradients of some tensors as they wait for their reduction."""
        elements = self.own.shapes.numel * self.own.shapes.copies * (self.own.table.trainable & tensors)
        return self._by_slot(bytes_of(elements, self.inventory.setting.dtype("reduce")))

    def handed(self, slot: int, *, first: bool) -> IntArray:
        """As under FSDP2, with the input of the reduction before."""
        at, handed = self.own.table.at, super().handed(slot, first=first)
        if slot == at.final:
            return handed
        if slot == at.embedding:
            return handed + self.of(self.reduced, self.block_of(0))
        return handed + np.asarray(self._reduced_before(slot, first=first))
