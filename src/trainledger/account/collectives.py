"""One kind of collective of a step, as arrays, and the bytes it puts on the wire."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from trainledger.arrays import FloatArray, IntArray

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "recv"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Calls of one kind on one group in one optimizer step, on one rank of each stage: arrays [plans, rows].

    ranks                 [plans]: size of the group; a group of one sends nothing and issues no call
    count                 calls per step
    in_bytes, out_bytes   of all calls together: what this rank passes in, what it gets out
    """

    op: Op
    group: str
    what: str
    dtype: str
    ranks: IntArray
    count: IntArray
    in_bytes: IntArray
    out_bytes: IntArray
    cite: str = ""

    def wire_bytes(self) -> FloatArray:
        """[plans, rows]: bytes this rank sends under the ring algorithm; float, because modelled.

        all-reduce 2 (N-1)/N of its input, all-gather and reduce-scatter (N-1)/N of the whole, all-to-all the part
        that leaves the rank. [thakur-2005: sections 4.1-4.4]
        """
        away = ((self.ranks - 1) / self.ranks)[:, None]
        match self.op:
            case "all_reduce":
                return 2.0 * away * self.in_bytes
            case "all_gather":
                return away * self.out_bytes
            case "reduce_scatter" | "all_to_all":
                return away * self.in_bytes
            case "send":
                return self.in_bytes.astype(np.float64)
            case "recv":
                return np.zeros(self.in_bytes.shape)


def collective(
    op: Op, group: str, what: str, dtype: str, ranks: IntArray, count: IntArray, size: IntArray, cite: str = ""
) -> Collective:
    """A Collective whose calls move `size` bytes each on the whole side: input of a reduction, output of a gather."""
    return summed(op, group, what, dtype, ranks, count, count * size, cite)


def summed(
    op: Op, group: str, what: str, dtype: str, ranks: IntArray, count: IntArray, total: IntArray, cite: str = ""
) -> Collective:
    """A Collective whose calls, which may differ in size, move `total` bytes together on the whole side.

    The other side of an all-gather or reduce-scatter is 1/ranks of it. Where the group is one rank all is zero.
    """
    active = (ranks > 1)[:, None]
    count, whole = count * active, total * active
    in_bytes = out_bytes = whole
    if op == "all_gather":
        in_bytes = whole // ranks[:, None]
    elif op == "reduce_scatter":
        out_bytes = whole // ranks[:, None]
    elif op == "send":
        out_bytes = np.zeros_like(whole)
    elif op == "recv":
        in_bytes = np.zeros_like(whole)
    return Collective(
        op=op,
        group=group,
        what=what,
        dtype="uint8" if dtype == "fp8" else dtype,
        ranks=ranks,
        count=count,
        in_bytes=in_bytes,
        out_bytes=out_bytes,
        cite=cite,
    )
