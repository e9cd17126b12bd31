"""The ways into and out of a tensor-parallel region, whose collectives give new tensors.

A gather along the tokens is a view of what arrives where a micro-batch has one sequence, else a copy of it; a
reduce-scatter along them copies first. [torch: distributed/_functional_collectives.py]
"""

from __future__ import annotations

import msgspec
import numpy as np

from trainledger.arrays import IntArray
from trainledger.dtypes import bytes_of
from trainledger.inventory.blocks.eager.ops import Count, Ops, Sheet
from trainledger.inventory.blocks.sizes import Sizes

ENTRY = ": input of a region"
"""How the names of operations end that begin a region. Parameters are DTensors outside it: what its backward gives them
waits, beside what is there, until the backward of the whole region is over. [runtime/parallelize/styles.py]"""


class Exchange:
    """The exchanges of one rank: none where nothing is cut.

    sp   hidden states between regions are cut along the tokens
    """

    def __init__(self, ops: Ops, sizes: Sizes) -> None:
        self.ops = ops
        self.sizes = sizes
        self.cut = sizes.cuts
        self.sp = sizes.slices

    @property
    def outside(self) -> IntArray:
        """[plans]: rows of hidden states between regions."""
        return self.sizes.tokens // self.sizes.sp_ranks

    def _copied(self, nbytes: IntArray) -> IntArray:
        return np.where(self.sizes.plans.mbs > 1, nbytes, 0)

    def enter(self, name: str, x: Sheet) -> Sheet:
        """Hidden states whole on every rank, the gradient a sum over them."""
        if not self.cut:
            return x
        if not self.sp:
            return self.ops.summed(name + ENTRY, x)
        return self._gathered(name + ENTRY, x)

    def leave(self, name: str, x: Sheet) -> Sheet:
        """A sum over the ranks; its gradient is whole on every rank."""
        if not self.cut:
            return x
        if not self.sp:
            made = self.ops.program.op(f"{name}: all-reduce", x.value, x.bytes(), passes=True)
            return msgspec.structs.replace(x, value=made)
        made = msgspec.structs.replace(x, rows=self.outside)
        whole = x.bytes()
        value = self.ops.program.op(
            f"{name}: reduce-scatter", x.value, made.bytes(), work=whole, back_work=self._copied(whole)
        )
        return msgspec.structs.replace(made, value=value)

    def _gathered(self, name: str, x: Sheet) -> Sheet:
        made = msgspec.structs.replace(x, rows=self.sizes.tokens)
        whole = made.bytes()
        value = self.ops.program.op(name, x.value, whole, work=self._copied(whole), back_work=whole)
        return msgspec.structs.replace(made, value=value)

    def whole_logits(self, x: Sheet, width: Count) -> Sheet:
        """Logits of the whole vocabulary; on the way back each rank copies its own part of the gradient."""
        if not self.cut:
            return x
        made = msgspec.structs.replace(x, width=width)
        value = self.ops.program.op("logits gathered", x.value, made.bytes(), work=made.bytes())
        return msgspec.structs.replace(made, value=value)

    def own_rows(self, name: str, x: Sheet) -> Sheet:
        """What a cut table looks up, zero where a row is another rank's: the mask and the index in the part wait."""
        if not self.cut:
            return x
        made = {"index": bytes_of(x.rows, "int64"), "own": bytes_of(x.rows, "uint8")}
        return msgspec.structs.replace(x, value=self.ops.program.op(name, x.value, x.bytes(), made=made))
