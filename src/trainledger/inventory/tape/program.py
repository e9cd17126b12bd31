"""A part of a model written down as operations on tensors, with what each keeps for its backward.

This is to memory what a traced graph is to arithmetic: nothing here knows an engine. Sizes are bytes, arrays [plans] or
integers. How long each storage lives follows from who uses it (walk.py).
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import msgspec

from trainledger.arrays import IntArray

Bytes = IntArray | int
Work = Bytes | tuple[Bytes, ...]

Rerun = Literal["whole", "asked", "early", "lazy", "discarded"]
"""How a recomputed region runs again: whole, until all that is kept is there, tensor by tensor as needed, or whole and
as soon as a backward needs its result, which was let go too."""

TO_THE_TURN, TO_THE_END = -1, -2
"""How long a variable stays that nobody drops: as long as the forward, or the backward too."""


class Value(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A tensor: bytes of its own elements, and the tensor whose storage it looks into (itself unless it is a view).

    at   where its bytes are among the sizes of its program
    """

    name: str
    nbytes: Bytes
    at: int
    differentiable: bool = True
    view_of: Value | None = None

    @property
    def root(self) -> Value:
        """The tensor that owns the storage."""
        return self.view_of.root if self.view_of is not None else self


class Op(msgspec.Struct, frozen=True, eq=False, gc=False, kw_only=True):
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
    keeps_last   what it keeps is there only once it has computed, as of a function of autograd in Python
    at           where the bytes of its work, back_work and weights, one after the other, are among the program's sizes
    """

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    keeps: tuple[Value, ...] = ()
    made: tuple[Value, ...] = ()
    weights: tuple[tuple[str, Bytes], ...] = ()
    work: tuple[Bytes, ...] = ()
    back_work: tuple[Bytes, ...] = ()
    passes: bool = False
    first_over: bool = False
    grad_into: Value | None = None
    region: int = 0
    pinned: bool = False
    product: bool = False
    keeps_last: bool = False
    at: int

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
        self.sizes: list[Bytes] = []
        self.held: dict[Value, int] = {}
        self.reruns: dict[int, Rerun] = {}
        self._outlines: list[Hashable] = []
        self._region = 0

    def outline(self) -> Hashable:
        """All that decides how long storages live and what they are called: programs that differ in sizes alone agree.

        A tensor stands in it for the place of its size.
        """
        inputs = tuple([(value.name, value.at, value.differentiable) for value in self.inputs])
        held = tuple([(value.at, until) for value, until in self.held.items()])
        return self.puts_off, inputs, tuple(self._outlines), held, tuple(self.reruns.items())

    def value(self, name: str, nbytes: Bytes, *, differentiable: bool = True, view_of: Value | None = None) -> Value:
        """A tensor for an operation that is added next to give."""
        self.sizes.append(nbytes)
        return Value(name, nbytes, len(self.sizes) - 1, differentiable, view_of)

    def input(self, name: str, nbytes: Bytes, *, differentiable: bool = True) -> Value:
        """A tensor that comes from outside; whoever made it lets go of it, so here it counts while it is used."""
        value = self.value(name, nbytes, differentiable=differentiable)
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
        keeps_last: bool = False,
        differentiable: bool = True,
    ) -> Value:
        """Add an operation with one output of `nbytes`; `in_place`: written over the first input's storage."""
        taken = (inputs,) if isinstance(inputs, Value) else tuple(inputs)
        output = self.value(name, nbytes, differentiable=differentiable, view_of=taken[0] if in_place else None)
        extra = ()
        if made:
            given = made.items()
            extra = tuple([self.value(f"{name}: {what}", amount, differentiable=False) for what, amount in given])
        self._add(
            Op(
                name=name,
                inputs=taken,
                outputs=(output,),
                keeps=(*keeps, *extra, output) if keeps_output else (*keeps, *extra),
                made=extra,
                weights=tuple(weights.items()) if weights else (),
                work=_several(work),
                back_work=_several(back_work),
                passes=passes,
                first_over=first_over,
                grad_into=grad_into,
                region=self._region,
                pinned=pinned,
                product=product,
                keeps_last=keeps_last,
                at=len(self.sizes),
            )
        )
        return output

    def split(self, name: str, value: Value, parts: Mapping[str, Bytes]) -> tuple[Value, ...]:
        """Views of parts of a tensor; the backward puts their gradients together in a new one of the whole size."""
        how = value.differentiable
        outputs = tuple([self.value(part, size, differentiable=how, view_of=value) for part, size in parts.items()])
        self.add(name, (value,), outputs)
        return outputs

    def view(self, name: str, value: Value) -> Value:
        """The same tensor in another shape."""
        output = self.value(name, value.nbytes, differentiable=value.differentiable, view_of=value)
        self.add(name, (value,), (output,), passes=True)
        return output

    def add(self, name: str, inputs: tuple[Value, ...], outputs: tuple[Value, ...], *, passes: bool = False) -> None:
        """Add an operation that keeps nothing and needs nothing beside; `outputs` are new tensors of this program."""
        at = len(self.sizes)
        self._add(Op(name=name, inputs=inputs, outputs=outputs, passes=passes, region=self._region, at=at))

    def _add(self, op: Op) -> None:
        sizes, keeps, made, weights = self.sizes, op.keeps, op.made, op.weights
        sizes += op.work
        sizes += op.back_work
        sizes += [nbytes for _, nbytes in weights]
        self.ops.append(op)
        self._outlines.append(
            (
                op.name,
                op.at,
                len(op.work),
                len(op.back_work),
                op.passes,
                op.first_over,
                op.pinned,
                op.product,
                op.keeps_last,
                op.region,
                -1 if op.grad_into is None else op.grad_into.at,
                _places(op.inputs),
                _named(op.outputs),
                _places(keeps) if keeps else keeps,
                _named(made) if made else made,
                tuple([name for name, _ in weights]) if weights else weights,
            )
        )

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


def _several(work: Work) -> tuple[Bytes, ...]:
    """The tensors that work is, of which an integer 0 is none."""
    if isinstance(work, tuple):
        return tuple([nbytes for nbytes in work if not isinstance(nbytes, int) or nbytes])
    return () if isinstance(work, int) and not work else (work,)


def _places(values: tuple[Value, ...]) -> tuple[int, ...]:
    return tuple([value.at for value in values])


def _named(values: tuple[Value, ...]) -> tuple[Hashable, ...]:
    return tuple([(v.name, v.at, v.differentiable, -1 if v.view_of is None else v.view_of.at) for v in values])
