"""The order of a program's operations: forward, backward in reverse, and where a recomputed region runs again."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from trainledger.inventory.tape.program import Op, Program, Value

Phase = Literal["forward", "again", "backward", "sum"]
"""sum: the operation's backward is over, and what it gave is added to gradients that were there; of the backward."""


def timeline(program: Program, *, sums: bool = False) -> list[tuple[Phase, Op]]:
    """Forward in order; backward in reverse, where a region runs again before its last operation's backward.

    One whose tensors are asked for by hooks waits for the first backward that reads any of them. A lazy region runs
    nothing again before a backward needs it; one whose result is discarded runs before the first backward that reads
    any of it.

    sums   with an instant of its own after the backward of what may give a tensor its second gradient
    """
    steps: list[tuple[Phase, Op]] = [("forward", op) for op in program.ops]
    started: set[int] = set()
    uses = Counter(value for op in program.ops for value in op.inputs if value.differentiable)
    needs = {region: _Needs(program, region) for region, how in program.reruns.items() if how == "lazy"}
    discarded = _first_readers(program)
    for op in reversed(program.ops):
        for region in discarded.get(op, ()):
            started.add(region)
            steps.extend(("again", other) for other in _second_run(program, region))
        if op.region in needs:
            steps.extend(("again", other) for other in needs[op.region].of(op))
        elif op.region and op.region not in started and _begins(program, op):
            started.add(op.region)
            steps.extend(("again", other) for other in _second_run(program, op.region))
        steps.append(("backward", op))
        if sums and any(uses[value] > 1 for value in op.inputs):
            steps.append(("sum", op))
    return steps


def _begins(program: Program, op: Op) -> bool:
    """Whether a region runs again at the latest before this operation's backward."""
    return program.reruns[op.region] not in ("early", "asked") or bool(op.keeps)


def stops(program: Program) -> set[Op]:
    """The last operations of second runs that end early: all that is kept of them is there before they compute."""
    ends = (_second_run(program, region)[-1:] for region, how in program.reruns.items() if how == "early")
    last = [op for end in ends for op in end if not op.keeps_last]
    return {op for op in last if not set(op.makes) & {value.root for value in op.keeps}}


def reads_backward(program: Program, op: Op) -> tuple[Value, ...]:
    """The tensors that an operation's backward reads, or its second run, of what comes from outside its region."""
    if program.reruns.get(op.region, "lazy") == "lazy":
        return op.keeps
    return (*op.keeps, *op.inputs)


def _first_readers(program: Program) -> dict[Op, list[int]]:
    """Operation -> the discarded regions that run again before its backward, in the order in which they do.

    It is the last operation that reads what they give, or the one whose backward makes that one run again.
    """
    made_in = {value: op.region for op in program.ops for value in op.makes}
    place = {op: index for index, op in enumerate(program.ops)}
    last = {op.region: place[op] for op in program.ops}
    discarded = sorted(region for region, how in program.reruns.items() if how == "discarded" and region in last)
    for region in reversed(discarded):
        for op in program.ops:
            if any(made_in.get(value.root) == region for value in reads_backward(program, op)):
                starts = last[op.region] if program.reruns.get(op.region, "lazy") != "lazy" else place[op]
                last[region] = max(last[region], starts)
    readers: dict[Op, list[int]] = {}
    for region in discarded:
        readers.setdefault(program.ops[last[region]], []).append(region)
    return readers


def _second_run(program: Program, region: int) -> list[Op]:
    members = [op for op in program.ops if op.region == region]
    if program.reruns[region] in ("whole", "asked", "discarded"):
        return members
    keeping = [index for index, member in enumerate(members) if member.keeps]
    return members[: keeping[-1] + 1 if keeping else 0]


class _Needs:
    """What has to run again, of one lazy region, before each backward; asked in the order of the backward."""

    def __init__(self, program: Program, region: int) -> None:
        members = [op for op in program.ops if op.region == region]
        self.makers = {value: op for op in members if not op.pinned for value in op.makes}
        self.there: set[Op] = set()

    def of(self, op: Op) -> list[Op]:
        """In the order in which they run."""
        found: list[Op] = []
        for value in op.keeps:
            self._make(value.root, found)
        return found

    def _make(self, value: Value, found: list[Op]) -> None:
        maker = self.makers.get(value)
        if maker is None or maker in self.there:
            return
        self.there.add(maker)
        for taken in maker.inputs:
            self._make(taken.root, found)
        found.append(maker)
