"""What all parts of a torchtitan model share: sizes, whether blocks are compiled, and what a checkpoint keeps.

A compiled block runs pointwise operations inside their neighbours: of a norm, a rotation, a gate nothing is made but
the result, and nothing kept but what is read anyway. Run eagerly each is a kernel with a result of its own. What a
compiled block keeps is what AOTAutograd's partitioner chooses: what matrices and attention read or give, and the
statistics of norms. [torch: _functorch/partitioners.py]
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from trainledger.arrays import IntArray, ceil_div
from trainledger.dtypes import bits, bytes_of
from trainledger.inventory.blocks.sizes import Sizes
from trainledger.inventory.tape import Program, Value
from trainledger.plans.plan import Plans
from trainledger.profiles.memory import MemoryRules

Bytes = IntArray | int

ONE_GRAPH = "one graph"
"""The word of `memory.passing` of an engine whose step is one graph of operations."""


def unlike(plans: Plans) -> NDArray[np.bool_]:
    """[plans, 4]: what plans must agree in to have the same operations: tp, sp, ep and cp in use or not."""
    return np.stack([plans.tp > 1, plans.sp_ranks > 1, plans.ep > 1, plans.cp > 1], axis=1)


class Builder:
    """Adds the operations of one part to a program; all plans agree in what is used (`unlike`).

    compiled    torch.compile runs the part as one graph
    selective   a checkpoint around the block keeps the results that the release lists, of matrices every second one
    summed, sliced, exchanged, ringed   tensor, sequence, expert, context parallelism is used
    """

    def __init__(self, sizes: Sizes, *, compiled: bool = False, selective: bool = False) -> None:
        self.program = Program()
        self.sizes = sizes
        self.compiled = compiled
        self.selective = selective
        self.summed, self.sliced, self.exchanged, self.ringed = unlike(sizes.plans)[0].tolist()
        self._matrices = 0

    @property
    def rules(self) -> MemoryRules:
        """Switches of the release."""
        return self.sizes.setting.profile.memory

    @property
    def one_graph(self) -> bool:
        """Whether forward and backward are one graph of operations. [torchtitan-graph-trainer]"""
        return self.rules.passing == ONE_GRAPH

    @contextmanager
    def recomputed(self, *, lazy: bool) -> Generator[None]:
        """A checkpoint around what is added inside; lazy: within a compiled graph, as one of the whole step is."""
        early = not self.sizes.setting.profile.traffic.recompute_reruns_last
        with self.program.recomputed(early_stop=early, asked=True, lazy=lazy or self.one_graph):
            yield

    def pins(self, what: str) -> bool:
        """Whether the selective checkpoint keeps results of this kind."""
        return self.selective and what in self.rules.selective_keeps

    @property
    def attention_kernel(self) -> str:
        """Which kernel attends."""
        return self.sizes.setting.attention_kernel

    def fp32(self, nbytes: Bytes) -> Bytes:
        """As many bytes as a copy in fp32 takes of a tensor in the dtype of activations."""
        return nbytes * bits("fp32") // bits(self.sizes.dtype)

    def weight(self, elements: IntArray | int) -> Bytes:
        """Bytes of a weight's gradient: in the dtype that the weight is multiplied in, or cast for its reduction."""
        dtype = self.sizes.setting.dtype("reduce") if self.one_graph else self.sizes.dtype
        return bytes_of(np.asarray(elements, dtype=np.int64), dtype)

    def gathered(self, x: Value, name: str) -> Value:
        """What the matrices of a tensor-parallel region read: x itself, or made whole of the ranks' slices.

        Slices along the tokens arrive one after the other, and are put in order by a copy; so are those that are sent
        back. [torch: distributed/_functional_collectives.py all_gather_tensor, reduce_scatter_tensor]
        """
        if not self.sliced:
            return x
        arrived = self.program.op(f"{name}, as it arrives", x, self.sizes.hidden)
        return self.program.op(name, arrived, self.sizes.hidden)

    def matrix(
        self, name: str, x: Value | Sequence[Value], nbytes: Bytes, weight: Bytes, *, counted: bool = True
    ) -> Value:
        """A product with a weight, which keeps what it reads; `counted`: a checkpoint keeps every second of these."""
        self._matrices += counted
        taken = (x,) if isinstance(x, Value) else tuple(x)
        pinned = counted and self.selective and self._matrices % 2 == 1
        return self.program.op(name, taken, nbytes, keeps=taken, weights={f"{name}: weight": weight}, pinned=pinned)

    def scattered(self, x: Value, name: str) -> Value:
        """Partial sums of the tensor-parallel ranks, summed and cut as the residual stream is."""
        if not self.summed:
            return x
        if self.sliced:
            x = self.program.op(f"{name}, as it leaves", x, self.sizes.hidden)
        return self.program.op(name, x, self.sizes.residual, pinned=self.sliced and self.pins("reduce_scatter"))

    @property
    def rows(self) -> IntArray:
        """[plans]: tokens of one rank between the tensor-parallel regions."""
        return ceil_div(self.sizes.tokens, self.sizes.plans.sp_ranks)
