"""A part of a model written down as operations on tensors, with what each keeps for its backward.

This is to memory what a traced graph is to arithmetic: nothing here knows an engine. Sizes are bytes, arrays [plans] or
integers. How long each storage lives follows from who uses it (walk.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from trainledger.arrays import IntArray

Bytes = IntArray | int
Work = Bytes | tuple[Bytes, ...]

Rerun = Literal["whole", "asked", "early", "lazy", "discarded"]
"""How a recomputed region runs again: whole, until all that is kept is there, tensor by tensor as needed, or whole and
as soon as a backward needs its result, which was let go too."""

TO_THE_TURN, TO_THE_END = -1, -2
"""How long a variable stays that nobody drops: as long as the forward, or the backward too."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Value:
    """A tensor: bytes of its own elements, and the tensor whose storage it looks into (itself unless it is a view)."""

    name: str
    nbytes: Bytes
    differentiable: bool = True
    view_of: Value | None = None

    @property
    def root(self) -> Value:
        """The tensor that owns the storage."""
        return self.view_of.root if self.view_of is not None else self


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Op:
    """One operation.

    keeps        tensors that wait for its backward: its inputs, its outputs, or `made` by it for that purpose alone
    made         tensors that only the backward reads, such as softmax statistics
    weights      (name, bytes) of the gradients that its backward gives its weights
    work         bytes it needs beside inputs and outputs while it runs forward; several where they are several tensors
    back_work    the same while it runs backward
    passes       its inputs' gradients are its output's: an addition, a reshape, a fused epilogue
    first_over   its first input's gradient is written over its output's, as a kernel does that writes several at once
    grad_into    the kept tensor that its input's gradient is written over
    region       which recomputed region it belongs to; 0: none
    pinned       in such a region, what it makes is kept and not computed again
    product      its weight's gradient multiplies its first input and the gradient of its output, and may be put off
    """

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    keeps: tuple[Value, ...] = ()
    made: tuple[Value, ...] = ()
    weights: tuple[tuple[str, Bytes], ...] = ()
    work: Work = 0
    back_work: Work = 0
    passes: bool = False
    first_over: bool = False
    grad_into: Value | None = None
    region: int = 0
    pinned: bool = False
    product: bool = False

    @property
    def makes(self) -> tuple[Value, ...]:
        """The tensors whose storages are new: outputs that are no views, and what only the backward reads."""
        return (*(value for value in self.outputs if value.view_of is None), *self.made)


class Program:
    """Operations in forward order; built by calling, as a model is.

    >>> program = Program()
    >>> x = program.input("x", 8)
    >>> y = program.op("square", x, 8, keeps=(x,))
    >>> [op.name for op in program.ops], y.nbytes
    (['square'], 8)
    """

    def __init__(self, *, puts_off: bool = False) -> None:
        """`puts_off`: products for gradients of weights are multiplied once the backward of the whole part is over."""
        self.puts_off = puts_off
        self.ops: list[Op] = []
        self.inputs: list[Value] = []
        self.held: dict[Value, int] = {}
        self.reruns: dict[int, Rerun] = {}
        self._region = 0

    def input(self, name: str, nbytes: Bytes, *, differentiable: bool = True) -> Value:
        """A tensor that comes from outside; whoever made it lets go of it, so here it counts while it is used."""
        value = Value(name, nbytes, differentiable)
        self.inputs.append(value)
        return value

    def op(
        self,
        name: str,
        inputs: Value | Sequence[Value],
        nbytes: Bytes,
        *,
        keeps: Sequence[Value] = (),
        keeps_output: bool = False,
        made: Mapping[str, Bytes] | None = None,
        weights: Mapping[str, Bytes] | None = None,
        work: Work = 0,
        back_work: Work = 0,
        passes: bool = False,
        in_place: bool = False,
        first_over: bool = False,
        grad_into: Value | None = None,
        pinned: bool = False,
        product: bool = False,
        differentiable: bool = True,
    ) -> Value:
        """Add an operation with one output of `nbytes`; `in_place`: written over the first input's storage."""
        taken = (inputs,) if isinstance(inputs, Value) else tuple(inputs)
        output = Value(name, nbytes, differentiable, taken[0] if in_place else None)
        extra = tuple(Value(f"{name}: {what}", amount, False) for what, amount in (made or {}).items())
        self.ops.append(
            Op(
                name=name,
                inputs=taken,
                outputs=(output,),
                keeps=(*keeps, *extra, *((output,) if keeps_output else ())),
                made=extra,
                weights=tuple((weights or {}).items()),
                work=work,
                back_work=back_work,
                passes=passes,
                first_over=first_over,
                grad_into=grad_into,
                region=self._region,
                pinned=pinned,
                product=product,
            )
        )
        return output

    def split(self, name: str, value: Value, parts: Mapping[str, Bytes]) -> tuple[Value, ...]:
        """Views of parts of a tensor; the backward puts their gradients together in a new one of the whole size."""
        outputs = tuple(Value(part, nbytes, value.differentiable, value) for part, nbytes in parts.items())
        self.ops.append(Op(name=name, inputs=(value,), outputs=outputs, region=self._region))
        return outputs

    def view(self, name: str, value: Value) -> Value:
        """The same tensor in another shape."""
        output = Value(name, value.nbytes, value.differentiable, value)
        self.ops.append(Op(name=name, inputs=(value,), outputs=(output,), passes=True, region=self._region))
        return output

    def hold(self, value: Value, *, through_backward: bool = False) -> None:
        """A local variable: the tensor stays as long as the operations that are added from here to the next `drop`.

        through_backward   it is a variable of whoever runs the backward too, and stays to its end
        """
        self.held[value] = TO_THE_END if through_backward else TO_THE_TURN

    def drop(self, *values: Value) -> None:
        """The function that held these tensors returns."""
        for value in values:
            self.held[value] = len(self.ops) - 1

    @property
    def inside_region(self) -> bool:
        """Whether operations that are added now belong to a recomputed region."""
        return self._region > 0

    @contextmanager
    def recomputed(
        self, *, early_stop: bool = True, asked: bool = False, lazy: bool = False, discarded: bool = False
    ) -> Generator[None]:
        """A checkpointed region: forward keeps its inputs alone, and backward runs it again.

        early_stop   the second run ends before the last operation that something is kept of, unless that is its result;
                     it begins as a backward first reads something that is kept
        asked        so does one that runs to its end; else that begins with the first backward of the region
        lazy         there is no second run: each tensor is made again just before the backward that needs it, as a
                     compiler orders the two in one graph
        discarded    what it gives is not kept either, by whatever reads it; it runs again before the first backward
                     that does [megatron: core/tensor_parallel/random.py, CheckpointWithoutOutput]
        """
        if self._region:
            raise AssertionError("a recomputed region inside another is not walked")
        self._region = len(self.reruns) + 1
        how: Rerun = "early" if early_stop else "asked" if asked else "whole"
        self.reruns[self._region] = "discarded" if discarded else "lazy" if lazy else how
        try:
            yield
        finally:
            self._region = 0
