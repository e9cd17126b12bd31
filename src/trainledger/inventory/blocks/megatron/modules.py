"""TransformerEngine's modules as operations: what each keeps of its input, gathers, and holds until it returns.

A module is one autograd function, so what it holds in a local name is alive until its backward is over: the gradient of
all tokens stays beside this rank's part of it. Under an FP8 recipe a matrix keeps its input in fewer bits, and its
backward turns the gradient that comes into that form too, by rows and by columns.
[te: pytorch/module/linear.py, layernorm_linear.py, grouped_linear.py]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from contextlib import contextmanager
from typing import ClassVar, TypedDict

import numpy as np

from trainledger.arrays import IntArray, ceil_div
from trainledger.dtypes import bits, bytes_of
from trainledger.inventory.blocks.sizes import Sizes
from trainledger.inventory.tape import Bytes, Program, Value


class Keeping(TypedDict):
    """What an operation keeps: tensors that are there, and ones that it makes."""

    keeps: tuple[Value, ...]
    made: dict[str, Bytes]


@dataclasses.dataclass(frozen=True)
class Modules:
    """Adds modules to a program; sizes are those of one micro-batch on one rank, arrays [plans].

    again        the parts of a layer that are recomputed
    native       these are Megatron's own (native.py)
    hands_empty  each backward hands autograd an empty tensor as large as the weight, whose gradient is elsewhere
    """

    program: Program
    sizes: Sizes
    again: tuple[str, ...] = ()
    native: ClassVar[bool] = False
    hands_empty: ClassVar[bool] = False

    @contextmanager
    def recomputed(self, part: str) -> Generator[None]:
        """A part of a layer that keeps its inputs alone where it is chosen; inside another such part it is none."""
        if part not in self.again or self.program.inside_region:
            yield
            return
        with self.program.recomputed(early_stop=False):
            yield

    @contextmanager
    def discarded(self, part: str) -> Generator[None]:
        """A part whose result is let go too where it is chosen, and made again before a backward needs it."""
        if part not in self.again or self.program.inside_region:
            yield
            return
        with self.program.recomputed(discarded=True):
            yield

    def sharded(self, elements: int, dtype: str = "") -> IntArray:
        """A tensor of the residual stream: cut along the tokens under sequence parallelism."""
        return self.sizes.cut(elements, self.sizes.plans.sp_ranks, dtype)

    def where_sp(self, nbytes: IntArray) -> IntArray:
        """Bytes that exist only where sequence parallelism cuts the tokens."""
        return np.where(self.sizes.plans.sp_ranks > 1, nbytes, 0)

    def per_head(self, heads: IntArray, width: int) -> IntArray:
        """Bytes of `width` elements for each token and each of this rank's heads."""
        return bytes_of(self.sizes.tokens * heads * width, self.sizes.dtype)

    def norm(self, name: str, x: Value, width: int) -> Value:
        """A norm of its own: keeps its input and one fp32 a token."""
        made = {"statistics": self.sharded(1, "fp32")}
        return self.program.op(name, x, self.sharded(width), keeps=(x,), made=made)

    def normed_column(self, name: str, x: Value, width: int, nbytes: IntArray) -> Value:
        """A norm and a matrix cut along its outputs, in one function.

        Keeps its input and the norm's output, each this rank's part of the tokens. Backward gathers the output again;
        the gradient of all tokens stays until the norm's backward has made another.
        """
        whole, normed = self.sizes.wide(width), self.sharded(width)
        return self.program.op(
            name,
            x,
            nbytes,
            keeps=(x,),
            made={"norm's output": self._multiplied(normed), "statistics": self.sharded(1, "fp32")},
            work=self.where_sp(self._multiplied(whole)),
            back_work=(
                whole,
                self.where_sp(self._multiplied(whole)),
                self._gradient(nbytes),
                self.empty(width, nbytes),
            ),
        )

    def column(self, name: str, x: Value, width: int, nbytes: IntArray) -> Value:
        """A matrix cut along its outputs: keeps its input, this rank's part of the tokens, and gathers it again."""
        whole = self.sizes.wide(width)
        gathered = self.where_sp(self._multiplied(whole))
        back_work = (self.where_sp(whole), gathered, self._gradient(nbytes), self.empty(width, nbytes))
        return self.program.op(name, x, nbytes, **self._input(x), work=gathered, back_work=back_work)

    def row(self, name: str, x: Value, width: int, *, original: bool = False) -> Value:
        """A matrix cut along its inputs: the sum over ranks is scattered, and its gradient gathered.

        original   whoever made its input keeps that anyway, so that it keeps no other form of it
        """
        whole = self.sizes.wide(width)
        gathered = self._gradient(whole) if self.quantised else self.where_sp(whole)
        keeping = self._input(x, original=original)
        back_work = (gathered, self.empty(width, x.nbytes))
        return self.program.op(name, x, self.sharded(width), **keeping, work=self.where_sp(whole), back_work=back_work)

    def duplicated(self, name: str, x: Value, width: int) -> Value:
        """A matrix that every rank has whole, on its own part of the tokens."""
        inputs = np.asarray(x.nbytes) // self.sharded(1)
        back_work = self.empty(width, self.sizes.wide(inputs))
        return self.program.op(name, x, self.sharded(width), **self._input(x), back_work=back_work)

    def grouped(self, name: str, x: Value, nbytes: IntArray, elements: IntArray) -> Value:
        """The same matrix of all experts of this rank, of so many elements together, on rows that are there already."""
        empty = bytes_of(elements, self.sizes.setting.recipe.weight) * self.hands_empty
        return self.program.op(name, x, nbytes, **self._input(x), back_work=(self._gradient(nbytes), empty))

    def empty(self, width: int, nbytes: Bytes) -> IntArray:
        """Bytes handed over for a matrix of which one side is `width`, the other that of a tensor of all tokens."""
        element = bytes_of(np.ones(1, dtype=np.int64), self.sizes.dtype)
        other = np.asarray(nbytes) // (self.sizes.tokens * element)
        return bytes_of(width * other, self.sizes.setting.recipe.weight) * self.hands_empty

    def added(self, name: str, stream: Value, branch: Value, *, dropout: bool) -> Value:
        """The residual addition, a new tensor; with dropout before it, which keeps a byte an element, in one kernel."""
        if dropout:
            branch = self.dropped(name, branch)
        return self.program.op(name, (stream, branch), stream.nbytes, passes=True)

    def dropped(self, name: str, x: Value) -> Value:
        """Dropout in the kernel of what comes before or after it: a byte an element is kept."""
        made = {"mask": self.sharded(self.sizes.hidden_size, "uint8")}
        return self.program.op(f"dropout after {name}", x, x.nbytes, in_place=True, made=made)

    @property
    def quantised(self) -> bool:
        """Whether matrices inside blocks are multiplied in 8 or 4 bits."""
        return bool(self.sizes.setting.recipe.multiplied)

    def _input(self, x: Value, *, original: bool = False) -> Keeping:
        """What a matrix keeps of its input: the tensor, or a form of it in fewer bits."""
        if not self.quantised or original:
            return Keeping(keeps=(x,), made={})
        return Keeping(keeps=(), made={"input in fewer bits": self._multiplied(x.nbytes)})

    def _multiplied(self, nbytes: Bytes) -> IntArray:
        """Bytes of a tensor in the form in which it is multiplied, its scales included."""
        if not self.quantised:
            return np.asarray(nbytes)
        recipe = self.sizes.setting.recipe
        elements = np.asarray(nbytes) // (bits(self.sizes.dtype) // 8)
        scales = ceil_div(elements, recipe.scale_block) if recipe.scale_block else elements * 0
        return bytes_of(elements, recipe.multiplied) + bytes_of(scales, recipe.scale_dtype)

    def _gradient(self, nbytes: Bytes) -> IntArray:
        """What a backward makes of the gradient that comes: nothing, or it in fewer bits twice over."""
        return 2 * self._multiplied(nbytes) if self.quantised else np.zeros(1, dtype=np.int64)


@dataclasses.dataclass(frozen=True)
class Earlier(Modules):
    """TransformerEngine's before 2.3, where nothing is kept from one backward to the next. [te-dummy]"""

    hands_empty = True
