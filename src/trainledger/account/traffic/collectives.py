"""One kind of collective of a step, as arrays, and the bytes it puts on the wire."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from trainledger.arrays import FloatArray, IntArray

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "recv"]
Routed = Literal["", "in", "out"]
"""Which side of a collective the routing of tokens decides."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Calls of one kind on one group in one optimizer step, on one rank of each stage: arrays [plans, rows].

    ranks   [plans]: size of the group; a group of one sends nothing and issues no call
    count   calls per step
    total   bytes of all calls together on the whole side: input of a reduction, output of a gather, what is sent
    routed  the side whose bytes the routing of tokens decides: `total` is what balanced routing makes of it
    hop     an all-to-all in which all that is sent goes to one neighbour
    """

    op: Op
    group: str
    what: str
    dtype: str
    ranks: IntArray
    count: IntArray
    total: IntArray
    cite: str = ""
    routed: Routed = ""
    hop: bool = False

    @property
    def in_bytes(self) -> IntArray:
        """What this rank passes in; of a gather its share."""
        if self.op == "all_gather":
            return self.total // self.ranks[:, None]
        return np.zeros_like(self.total) if self.op == "recv" else self.total

    @property
    def out_bytes(self) -> IntArray:
        """What this rank gets out; of a scatter its share."""
        if self.op == "reduce_scatter":
            return self.total // self.ranks[:, None]
        return np.zeros_like(self.total) if self.op == "send" else self.total

    def wire_bytes(self) -> FloatArray:
        """[plans, rows]: bytes this rank sends under the ring algorithm; float, because modelled.

        all-reduce 2 (N-1)/N of its input, all-gather and reduce-scatter (N-1)/N of the whole, all-to-all the part
        that leaves the rank, which of a hop is all of it. [thakur-2005: sections 4.1-4.4]
        """
        if self.op == "send" or self.hop:
            return self.total.astype(np.float64)
        if self.op == "recv":
            return np.zeros(self.total.shape)
        away = ((self.ranks - 1) / self.ranks)[:, None]
        return 2.0 * away * self.total if self.op == "all_reduce" else away * self.total


def collective(
    op: Op, group: str, what: str, dtype: str, ranks: IntArray, count: IntArray, size: IntArray, cite: str = ""
) -> Collective:
    """A Collective whose calls move `size` bytes each on the whole side: input of a reduction, output of a gather."""
    return summed(op, group, what, dtype, ranks, count, count * size, cite)


def summed(
    op: Op,
    group: str,
    what: str,
    dtype: str,
    ranks: IntArray,
    count: IntArray,
    total: IntArray,
    cite: str = "",
    *,
    routed: Routed = "",
    hop: bool = False,
) -> Collective:
    """A Collective whose calls, which may differ in size, move `total` bytes together on the whole side.

    Where the group is one rank all is zero.
    """
    if ranks.min() == 1:
        active = (ranks > 1)[:, None]
        count, total = count * active, total * active
    width = "uint8" if dtype == "fp8" else dtype
    return Collective(
        op=op,
        group=group,
        what=what,
        dtype=width,
        ranks=ranks,
        count=count,
        total=total,
        cite=cite,
        routed=routed,
        hop=hop,
    )
