"""A backward for inputs alone, whose graph is kept until the gradients of weights are computed from it.

Nothing that was kept is let go of, and what reaches an operation that has weights waits there, for those gradients.
They come one operation after the other; each lets go of what nothing else waits for, and the rest goes in the end.
[torch: distributed/pipelining/_backward.py stage_backward_input, stage_backward_weight]
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

import msgspec

from trainledger.inventory.tape.program import Bytes, Op, Program, Value
from trainledger.inventory.tape.tape import Life, Tape, taped
from trainledger.inventory.tape.walk import Walk


@dataclasses.dataclass(frozen=True, kw_only=True)
class Later:
    """The gradients of one operation's weights: their bytes, and the storages of the tape that they let go of."""

    name: str
    gradients: tuple[Bytes, ...]
    frees: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """A backward for inputs, what stays after it (storages of its tape, but for what it hands on) and what follows."""

    tape: Tape
    stays: tuple[int, ...]
    later: tuple[Later, ...]


def retained(program: Program, output: Value | None, *, anew: bool = False) -> Split:
    """Such a backward of a program; what stays lives until after the tape's last instant."""
    weights = {msgspec.structs.replace(op, weights=()): op.weights for op in program.ops}
    before, program.ops = program.ops, list(weights)
    walk = _Retained(program, output, anew=anew, waiting=[op for op, given in weights.items() if given])
    tape = taped(walk.lifetimes(), program.sizes)
    lives = tape.lifetimes.lives
    index = {id(storage): i for i, storage in enumerate(lives)}
    later = tuple(
        Later(
            name=op.name, gradients=tuple(nbytes for _, nbytes in weights[op]), frees=tuple(index[id(s)] for s in freed)
        )
        for op, freed in walk.freed()
    )
    program.ops = before
    until = len(tape.instants)
    stays = (i for i, storage in enumerate(lives) if storage.last >= until and not storage.leaves)
    return Split(tape=tape, stays=tuple(stays), later=later)


class _Retained(Walk):
    def __init__(self, program: Program, output: Value | None, *, anew: bool, waiting: list[Op]) -> None:
        super().__init__(program, output, anew=anew)
        self.waiting = waiting
        self.reached: dict[Op, list[Life]] = {op: [] for op in waiting}

    def _forward(self, op: Op, instant: int, *, again: bool) -> None:
        super()._forward(op, instant, again=again)
        if not op.region:
            for value in op.keeps:
                self.first[value.root].touch(self.end + 1)

    def _backward(self, op: Op, instant: int) -> None:
        super()._backward(op, instant)
        if op in self.reached:
            self.reached[op] = [self.gradients[value] for value in op.outputs if value in self.gradients]
            for storage in self.reached[op]:
                storage.touch(self.end + 1)

    def freed(self) -> Iterator[tuple[Op, list[Life]]]:
        """Each operation that has weights, in forward order, with what nothing else waits for after it."""
        users: Counter[int] = Counter()
        for op in self.program.ops:
            users.update({id(storage) for storage in self._used(op)})
        for op in self.waiting:
            used = {id(storage): storage for storage in self._used(op)}
            users.subtract(used.keys())
            yield op, [storage for key, storage in used.items() if not users[key]]

    def _used(self, op: Op) -> list[Life]:
        return [*(self.first[value.root] for value in op.keeps), *self.reached.get(op, [])]
