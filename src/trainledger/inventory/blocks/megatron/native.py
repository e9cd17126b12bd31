"""Megatron's own modules, as before TransformerEngine: norms and matrices apart, and products that may be put off.

A matrix keeps its input, this rank's part of the tokens, and gathers it into a buffer that all matrices share and that
stays. Its backward hands autograd an empty tensor as large as the weight, whose gradient has been added elsewhere.
[zero-bubble-fork: megatron/core/tensor_parallel/layers.py]
"""

from __future__ import annotations

import dataclasses

from trainledger.arrays import IntArray
from trainledger.inventory.blocks.megatron.modules import Modules
from trainledger.inventory.tape import Value


@dataclasses.dataclass(frozen=True)
class Native(Modules):
    """The same modules under the same names."""

    native = True
    hands_empty = True

    def norm(self, name: str, x: Value, width: int) -> Value:
        """A fused norm: keeps its input, and mean and deviation of each token."""
        made = {"statistics": self.sharded(2, "fp32")}
        return self.program.op(name, x, self.sharded(width), keeps=(x,), made=made)

    def normed_column(self, name: str, x: Value, width: int, nbytes: IntArray) -> Value:
        """A norm, and a matrix cut along its outputs."""
        return self.column(name.removeprefix("norm, "), self.norm(f"norm before {name}", x, width), width, nbytes)

    def column(self, name: str, x: Value, width: int, nbytes: IntArray) -> Value:
        """A matrix cut along its outputs."""
        whole = self.where_sp(self.sizes.wide(width))
        work = (whole, self.empty(width, nbytes))
        return self.program.op(name, x, nbytes, keeps=(x,), back_work=work, product=True)

    def row(self, name: str, x: Value, width: int, *, original: bool = False) -> Value:
        """A matrix cut along its inputs: the sum over ranks is scattered, and its gradient gathered."""
        del original
        whole = self.where_sp(self.sizes.wide(width))
        work = (whole, self.empty(width, x.nbytes))
        return self.program.op(name, x, self.sharded(width), keeps=(x,), work=whole, back_work=work, product=True)
