"""ATen's operations as PyTorch runs them eagerly on a CPU: what each makes, and what it keeps for its backward.

What is kept is read in ATen's derivatives. [torch: tools/autograd/derivatives.yaml, csrc/autograd/FunctionsManual.cpp]
A norm, a rotation, a mask are several operations here, since eagerly each is; a fused kernel would be one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec

from trainledger.arrays import IntArray
from trainledger.dtypes import bytes_of
from trainledger.inventory.blocks.eager.adapted import adapted
from trainledger.inventory.blocks.eager.fp8 import Emulated
from trainledger.inventory.blocks.frozen import Frozen
from trainledger.inventory.tape import Program, Value

Count = IntArray | int


class Sheet(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A tensor seen as rows of one width: [plans] each; most often tokens times features."""

    value: Value
    rows: IntArray
    width: Count
    dtype: str

    def bytes(self, dtype: str = "") -> IntArray:
        """Of all elements, in the tensor's own dtype unless another is named."""
        return bytes_of(self.rows * self.width, dtype or self.dtype)


class Ops:
    """Adds operations to a program; every result is a Sheet.

    dtype     of weights as they are computed with, and so of their gradients
    frozen    which of them train, and how those that do not are multiplied (adapters.py)
    modules   norms and attention are those of transformers, on a card (inventory/blocks/transformers.py)
    casts     how matrices of blocks are multiplied in FP8; None: in the dtype of what they are given
    """

    modules: ClassVar[bool] = False

    def __init__(self, program: Program, dtype: str, frozen: Frozen | None = None) -> None:
        self.program = program
        self.dtype = dtype
        self.casts: Emulated | None = None
        self.frozen = Frozen() if frozen is None else frozen
        self.shared: set[Value] = set()

    @property
    def rank(self) -> int:
        """Of adapters; 0: every weight trains."""
        return self.frozen.rank

    def trained(self, nbytes: Mapping[str, IntArray]) -> Mapping[str, IntArray]:
        """Gradients of weights, of which there are none beside adapters."""
        return {} if self.rank else nbytes

    def adapts(self, module: str) -> bool:
        """Whether a module, by the last part of its name, has an adapter."""
        return self.frozen.adapts(module)

    def input(self, name: str, rows: IntArray, width: Count, dtype: str = "") -> Sheet:
        """A tensor from outside."""
        chosen = dtype or self.dtype
        return Sheet(self.program.input(name, bytes_of(rows * width, chosen)), rows, width, chosen)

    def view(self, name: str, x: Sheet, rows: IntArray | None = None, width: Count | None = None) -> Sheet:
        """The same elements under another shape; the backward only looks at the gradient differently."""
        value = self.program.view(name, x.value)
        return Sheet(value, x.rows if rows is None else rows, x.width if width is None else width, x.dtype)

    def new(
        self,
        name: str,
        x: Sheet,
        *,
        rows: IntArray | None = None,
        width: Count | None = None,
        keeps: Sequence[Value] = (),
    ) -> Sheet:
        """An operation whose result and whose gradient are tensors of their own: neg, index, gather."""
        made = Sheet(x.value, x.rows if rows is None else rows, x.width if width is None else width, x.dtype)
        return msgspec.structs.replace(made, value=self.program.op(name, x.value, made.bytes(), keeps=keeps))

    def clone(self, name: str, x: Sheet) -> Sheet:
        """A copy of its own, whose gradient is handed on as it is: contiguous, clone."""
        return msgspec.structs.replace(x, value=self.program.op(name, x.value, x.bytes(), passes=True))

    def summed(self, name: str, x: Sheet) -> Sheet:
        """X itself, whose gradient is a new tensor: the sum over ranks."""
        (value,) = self.program.split(name, x.value, {name: x.bytes()})
        return msgspec.structs.replace(x, value=value)

    def cast(self, name: str, x: Sheet, dtype: str) -> Sheet:
        """`x.to(dtype)`, which is x itself where it is of that dtype."""
        if x.dtype == dtype:
            return x
        return Sheet(self.program.op(name, x.value, x.bytes(dtype)), x.rows, x.width, dtype)

    def linear(
        self, name: str, x: Sheet, width: Count, *, bias: bool = False, module: str = "", wide: bool = False
    ) -> Sheet:
        """X [rows, in] times a matrix [width, in]: keeps x; the gradients of weight and bias are made at once.

        module   the last part of its module's name; empty: of none that could have an adapter
        wide     it is in the dtype of x whatever the recipe casts
        """
        given = x if wide or not self.rank else self.cast(f"{name}: input in {self.dtype}", x, self.dtype)
        elements = width * (x.width + 0 * x.rows)
        weights = {f"{name}: weight": bytes_of(elements, self.dtype)}
        if bias:
            weights[f"{name}: bias"] = bytes_of(width + 0 * x.rows, self.dtype)
        made = Sheet(given.value, x.rows, width, given.dtype)
        casts = None if wide else self.casts
        sides = (x.rows * x.width, elements, made.rows * made.width)
        again = self.frozen.unpacked(module, elements, self.dtype)
        value = self.program.op(
            name,
            given.value,
            made.bytes(),
            keeps=(given.value,) if not self.rank or self.frozen.keeps_input(module) else (),
            made={**self.frozen.cast_weight(module, elements, self.dtype), **self._kept_before(module, given)},
            weights=self.trained(weights),
            work=casts.forward(*sides) if casts is not None else again,
            back_work=casts.back(*sides) if casts is not None else again,
            keeps_last=casts is not None,
        )
        made = msgspec.structs.replace(made, value=value)
        if self.frozen.gives_back(module):
            made = self.cast(f"{name}: in {x.dtype}", made, x.dtype)
        return adapted(self, name, x, made) if self.adapts(module) else made

    def _kept_before(self, module: str, x: Sheet) -> Mapping[str, IntArray]:
        """What a 4-bit product kept of its input in the step before, of one that several share once."""
        longer = self.frozen.keeps_input(module) and self.frozen.keeps == "steps" and not self.program.inside_region
        if not longer or x.value.root in self.shared:
            return {}
        self.shared.add(x.value.root)
        return {"input of the step before": x.bytes()}

    def add(self, name: str, a: Sheet, b: Sheet) -> Sheet:
        """A + b of one shape: both gradients are the result's own, but for one that is cast to a narrower dtype."""
        if b.dtype != a.dtype:
            narrow = self.program.op(f"{name}: gradient in {b.dtype}", b.value, b.bytes(), in_place=True)
            b = msgspec.structs.replace(b, value=narrow)
        return msgspec.structs.replace(a, value=self.program.op(name, (a.value, b.value), a.bytes(), passes=True))

    def mul(self, name: str, a: Sheet, b: Sheet) -> Sheet:
        """A * b of one shape, both of which need a gradient: each keeps the other."""
        both = (a.value, b.value)
        return msgspec.structs.replace(a, value=self.program.op(name, both, a.bytes(), keeps=both))

    def scale(self, name: str, x: Sheet, *, keeps: Sequence[Value] = ()) -> Sheet:
        """X times a constant: a number, or a tensor that needs no gradient and that whoever made it counts."""
        return msgspec.structs.replace(x, value=self.program.op(name, x.value, x.bytes(), keeps=keeps))

    def from_input(self, name: str, x: Sheet) -> Sheet:
        """A function of every element that keeps what it was given: silu, gelu."""
        return msgspec.structs.replace(x, value=self.program.op(name, x.value, x.bytes(), keeps=(x.value,)))

    def from_output(self, name: str, x: Sheet) -> Sheet:
        """A function of every element that keeps what it gave: relu, tanh, sigmoid."""
        return msgspec.structs.replace(x, value=self.program.op(name, x.value, x.bytes(), keeps_output=True))

    def square(self, name: str, x: Sheet) -> Sheet:
        """X ** 2: the backward makes x ** 1 and twice that before the gradient. [torch: pow_backward]"""
        whole = x.bytes()
        value = self.program.op(name, x.value, whole, keeps=(x.value,), back_work=(whole, whole))
        return msgspec.structs.replace(x, value=value)

    def slice(self, name: str, x: Sheet, width: Count) -> Sheet:
        """x[..., a:b]: a view, whose backward writes the gradient into zeros of the whole shape."""
        part = Sheet(x.value, x.rows, width, x.dtype)
        (value,) = self.program.split(name, x.value, {name: part.bytes()})
        return msgspec.structs.replace(part, value=value)

    def chunks(self, name: str, x: Sheet, widths: dict[str, Count]) -> list[Sheet]:
        """Views of parts side by side; one backward joins their gradients into a new tensor."""
        parts = {part: Sheet(x.value, x.rows, width, x.dtype) for part, width in widths.items()}
        values = self.program.split(name, x.value, {part: sheet.bytes() for part, sheet in parts.items()})
        return [
            msgspec.structs.replace(sheet, value=value) for sheet, value in zip(parts.values(), values, strict=True)
        ]

    def join(self, name: str, *parts: Sheet) -> Sheet:
        """Parts side by side in a new tensor; their gradients are views of the whole's."""
        first = parts[0]
        made = Sheet(first.value, first.rows, sum((part.width for part in parts), 0), first.dtype)
        value = self.program.op(name, tuple(part.value for part in parts), made.bytes(), passes=True)
        return msgspec.structs.replace(made, value=value)

    def padded(self, name: str, x: Sheet, width: Count) -> Sheet:
        """X widened with zeros, a copy; the gradient is a view of the result's."""
        made = Sheet(x.value, x.rows, width, x.dtype)
        return msgspec.structs.replace(made, value=self.program.op(name, x.value, made.bytes(), passes=True))

    def spread(self, name: str, x: Sheet, rows: IntArray) -> Sheet:
        """X seen by several rows at once, a view; the gradient is summed over them."""
        (value,) = self.program.split(name, x.value, {name: x.bytes()})
        return Sheet(value, rows, x.width, x.dtype)
