"""Walk a program forward and backward: which storages are alive at which instant, and so the most that ever is.

Rules of the walk, those of a reference-counted autograd:
  a tensor lives from the operation that makes it to the last that uses it forward, or to the backward it waits for;
  a gradient lives from the first backward that gives it to the backward of whatever made its tensor, and a second one
  is added into the first, or into a new tensor once the operation that gave it is over; a checkpointed region runs
  again before its backward, and what it makes then is new.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from trainledger.inventory.tape.order import Phase, reads_backward, stops, timeline
from trainledger.inventory.tape.program import TO_THE_END, TO_THE_TURN, Op, Program, Value
from trainledger.inventory.tape.tape import Kind, Life, Lifetimes, Tape, taped

KNOWN = 1024
"""How many outlines of programs are remembered with their lifetimes."""

_known: dict[Hashable, Lifetimes] = {}


def walk(program: Program, output: Value | None, *, anew: bool = False) -> Tape:
    """The tape of a program whose last tensor is handed on; None: a loss, whose gradient takes no room.

    anew   gradients that meet are added into a new tensor, as autograd does while a dispatch mode looks on
           [torch: csrc/autograd/input_buffer.cpp, can_accumulate_inplace]
    """
    key = (program.outline(), -1 if output is None else output.at, anew)
    found = _known.get(key)
    if found is None:
        if len(_known) >= KNOWN:
            _known.clear()
        found = _known[key] = Walk(program, output, anew=anew).lifetimes()
    return taped(found, program.sizes)


class Walk:
    """One walk of a program; what runs its backward in another way differs in a method or two."""

    def __init__(self, program: Program, output: Value | None, *, anew: bool) -> None:
        self.program = program
        self.output = output
        self.anew = anew
        self.steps = timeline(program, sums=anew)
        self.turn = len(program.ops)
        self.end = len(self.steps) - 1
        self.back = {op: i for i, (phase, op) in enumerate(self.steps) if phase == "backward"}
        self.again = {op: i for i, (phase, op) in enumerate(self.steps) if phase == "again"}
        self.made_in = {value: op.region for op in program.ops for value in op.makes}
        self.pinned = {value for op in program.ops if op.pinned and op.region for value in op.makes}
        self.stopped = stops(program)
        self.discarded = {value for value, region in self.made_in.items() if program.reruns.get(region) == "discarded"}
        self.over = {op.region: self.back[op] for op in reversed(program.ops)}
        """When the backward of a region is over, which is that of its first operation."""
        self.wanted = self._wanted() if self.discarded else {}
        self.storages: list[Life] = []
        self.first: dict[Value, Life] = {}
        self.second: dict[Value, Life] = {}
        self.gradients: dict[Value, Life] = {}

    def lifetimes(self) -> Lifetimes:
        """Walk, and say what lived when."""
        for value in self.program.inputs:
            self.first[value] = self._new(value.name, value.at, "tensor", -1)
        if self.output is not None:
            self.gradients[self.output] = self._new("gradient of the output", self.output.at, "gradient", self.turn)
        for instant, (phase, op) in enumerate(self.steps):
            if phase == "backward":
                self._backward(op, instant)
            elif phase != "sum":
                self._forward(op, instant, again=phase == "again")
        self._outlive()
        index = {id(storage): i for i, storage in enumerate(self.storages)}
        return Lifetimes(
            instants=tuple(_named(self.steps)),
            turn=self.turn,
            lives=tuple(self.storages),
            output=-1 if self.output is None else index[id(self.first[self.output.root])],
            returned=-1 if self.output is None else len(self.program.inputs),
            factors=tuple(self._factors()),
        )

    def _factors(self) -> Iterator[int]:
        """What products for gradients of weights multiply: inputs, each once, and gradients of outputs."""
        products = [op for op in self.program.ops if op.product]
        yield from (value.at for value in dict.fromkeys(op.inputs[0] for op in products))
        yield from (op.outputs[0].at for op in products)

    def _new(self, name: str, at: int, kind: Kind, born: int) -> Life:
        storage = Life(name, at, kind, born, born)
        self.storages.append(storage)
        return storage

    def _work(self, op: Op, first: int, count: int, instant: int) -> None:
        for at in range(first, first + count):
            self._new(f"{op.name}: work", at, "work", instant)

    def _storage(self, value: Value, region: int, *, again: bool) -> Life:
        """Where a tensor lies as an operation of `region` sees it; run again, a region sees what it made anew."""
        root = value.root
        if root in self.discarded:
            return self.second[root] if root in self.second else self.first[root]
        inside = again and self.made_in.get(root, 0) == region and root not in self.pinned
        return self.second[root] if inside else self.first[root]

    def _forward(self, op: Op, instant: int, *, again: bool) -> None:
        first_time_in_region = op.region > 0 and not again
        for value in op.inputs:
            self._storage(value, op.region, again=again).touch(instant)
        if not (again and (op.pinned or op in self.stopped)):
            self._work(op, op.at, len(op.work), instant)
            table = self.second if again else self.first
            for value in op.makes:
                if op.pinned or not first_time_in_region or value not in op.made:
                    table[value] = self._new(value.name, value.at, "tensor", instant)
                    if again and value in self.wanted:
                        table[value].touch(self.wanted[value])
        if first_time_in_region:
            self._keep_region_inputs(op)
        else:
            for value in op.keeps:
                if again or value.root not in self.discarded:
                    self._storage(value, op.region, again=again).touch(self.back[op])

    def _wanted(self) -> dict[Value, int]:
        """Until when what discarded regions make again is read: by a backward, or by a region that keeps its inputs."""
        wanted: dict[Value, int] = {}
        for op in self.program.ops:
            until = self.over[op.region] if self.program.reruns.get(op.region, "lazy") != "lazy" else self.back[op]
            for value in reads_backward(self.program, op):
                if value.root in self.discarded and self.made_in[value.root] != op.region:
                    wanted[value.root] = max(wanted.get(value.root, 0), until)
        return wanted

    def _keep_region_inputs(self, op: Op) -> None:
        """A checkpoint keeps what its region reads from outside until its backward is over.

        What is pinned waits until it would run again; of that a compiler keeps what a backward reads.
        """
        over = self.over[op.region]
        for value in op.inputs:
            if self.made_in.get(value.root, 0) != op.region and value.root not in self.discarded:
                self.first[value.root].touch(over)
        if op.pinned and self.program.reruns[op.region] != "lazy":
            for value in op.makes:
                self.first[value].touch(self.again.get(op, self.back[op]))

    def _backward(self, op: Op, instant: int) -> None:
        coming = [self.gradients[v] for v in op.outputs if v in self.gradients]
        if not coming and not (self.output is None and op is self.program.ops[-1]):
            return
        for gradient in coming:
            gradient.touch(self.end if self.program.puts_off and op.product else instant)
        if self.program.puts_off and op.product:
            self._storage(op.inputs[0], op.region, again=op.region > 0).touch(self.end)
        if self.program.reruns.get(op.region) == "lazy":
            for value in op.keeps:
                self._storage(value, op.region, again=True).touch(instant)
        first = op.at + len(op.work)
        self._work(op, first, len(op.back_work), instant)
        for at, (name, _) in enumerate(op.weights, start=first + len(op.back_work)):
            self._new(name, at, "weight gradient", instant).touch(self.end)
        for value in op.inputs:
            if value.differentiable:
                self._give(op, value, coming, instant)

    def _give(self, op: Op, value: Value, coming: list[Life], instant: int) -> None:
        """The gradient of one input: the output's own, written over a kept tensor, new, or added to what is there."""
        there = value in self.gradients
        if coming and (op.passes or (op.first_over and value is op.inputs[0] and not there)):
            two = self.gradients.setdefault(value, coming[0]) is not coming[0]
            coming[0].touch(instant + (two and self.anew))
            self._sum(value, two, instant)
        elif op.grad_into is not None:
            over = self._storage(op.grad_into, op.region, again=op.region > 0)
            over.touch(instant)
            self.gradients.setdefault(value, over)
        elif there:
            second = self._new(f"gradient of {value.name}, second", value.at, "gradient", instant)
            second.touch(instant + self.anew)
            self._sum(value, True, instant)
        else:
            self.gradients[value] = self._new(f"gradient of {value.name}", value.at, "gradient", instant)
        self.gradients[value].touch(instant)

    def _sum(self, value: Value, two: bool, instant: int) -> None:
        """Two gradients of a tensor become one: the first that is there, or a new one at the instant that follows."""
        self.gradients[value].touch(instant)
        if two and self.anew:
            self.gradients[value].touch(instant + 1)
            self.gradients[value] = self._new(f"gradient of {value.name}, sum", value.at, "gradient", instant + 1)

    def _held_again(self, value: Value, until: int) -> int:
        """When the function that held a tensor returns as its region runs again; ended early, it returns there."""
        ops = self.program.ops if until < 0 else self.program.ops[: until + 1]
        region = self.made_in[value.root]
        return max(self.again[op] for op in ops if op.region == region and op in self.again)

    def _outlive(self) -> None:
        """What is handed on, what a local variable holds, and gradients that leave with the tape."""
        if self.output is not None:
            self.first[self.output.root].touch(self.turn - 1)
        undropped = {TO_THE_TURN: self.turn - 1, TO_THE_END: self.end}
        for value, until in self.program.held.items():
            self.first[value.root].touch(undropped.get(until, until))
            how = self.program.reruns[self.made_in[value.root]] if value.root in self.second else "lazy"
            if how in ("whole", "asked", "early"):
                self.second[value.root].touch(self._held_again(value, until))
        for value in self.program.inputs:
            if value in self.gradients:
                self.gradients[value].touch(self.end)
                self.gradients[value].leaves = True


def _named(steps: list[tuple[Phase, Op]]) -> Iterator[tuple[Phase, str]]:
    for phase, op in steps:
        yield phase, f"{op.name}: gradients added" if phase == "sum" else op.name
