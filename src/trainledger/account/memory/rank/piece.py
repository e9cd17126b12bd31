"""A part of a model on one rank: what is alive while it runs forward and backward, and what stays in between."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from trainledger.account.memory.rank.units import Unit
from trainledger.arrays import IntArray
from trainledger.inventory.blocks.eager.exchange import ENTRY
from trainledger.inventory.blocks.eager.moe import EXPERTS, TURNED
from trainledger.inventory.tape import Split, Storage, Tape


class Stretch(NamedTuple):
    """Instants of a piece that follow each other; bytes.

    within   the unit of experts whose operations they are; None: they are outside
    again    a recomputation
    most     the most that is alive in them
    ends     what is alive after the last, without gradients of that unit
    """

    within: Unit | None
    again: bool
    most: int
    ends: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """A part of a model on this rank: a tape, and the unit whose weights it needs; None: none of its own.

    opens, closes      it is the first, the last part of its unit to run forward: tied ends are one
    inner              routed experts that are a unit of their own, whose operations' names begin with EXPERTS
    lent, lent_back    its input, the gradient of its output lies in a buffer that is counted elsewhere
    inputs             a backward for inputs alone, where a schedule has such
    """

    label: str
    tape: Tape
    inputs: Split | None = None
    inner: Unit | None = None
    unit: Unit | None = None
    opens: bool = True
    closes: bool = True
    lent: bool = False
    lent_back: bool = False

    @property
    def awaits(self) -> bool:
        """The gradient of a tied weight waits for that of its other place."""
        return self.closes and not self.opens

    @property
    def joins(self) -> bool:
        """Its gradient of a tied weight is added to the one that waits."""
        return self.opens and not self.closes

    @cached_property
    def _lent(self) -> list[int]:
        """Storages of the tape that are not counted here."""
        return [*([0] if self.lent else []), *([self.tape.returned] if self.lent_back else [])]

    @cached_property
    def saved(self) -> int:
        """Bytes kept between forward and backward."""
        whole = int(self.tape.saved[0])
        return whole - sum(int(self.tape.bytes[index, 0]) for index in self._lent if self.tape.waits[index])

    @cached_property
    def handed(self) -> int:
        """Bytes of the gradient that goes on to whatever ran before."""
        return int(self.tape.handed[0])

    @cached_property
    def given(self) -> int:
        """Bytes of what it gives that it does not keep itself."""
        tape = self.tape
        return 0 if tape.output < 0 or tape.waits[tape.output] else int(tape.bytes[tape.output, 0])

    def _counted(self, tape: Tape) -> IntArray:
        """[instants]: bytes alive, gradients of weights left out."""
        away = sum((tape.alive[:, index] * tape.bytes[index, 0] for index in self._lent), 0)
        return tape.totals[:, 0] - away

    @cached_property
    def _totals(self) -> IntArray:
        return self._counted(self.tape)

    @cached_property
    def for_inputs(self) -> tuple[int, int]:
        """(the most that is alive in a backward for inputs alone, what that leaves for the gradients of weights)."""
        split = self._split
        most = self._counted(split.tape)[split.tape.turn :].max()
        return int(most), self._bytes(split.stays)

    @cached_property
    def for_weights(self) -> list[tuple[Unit | None, int, int]]:
        """(unit, gradients, what they let go of) of each operation that has weights, in forward order."""
        made: list[tuple[Unit | None, int, int]] = []
        for one in self._split.later:
            unit = self.inner if self.inner is not None and one.name.startswith(EXPERTS) else self.unit
            given = sum(int(np.atleast_1d(nbytes)[0]) for nbytes in one.gradients)
            made.append((unit, given, self._bytes(one.frees)))
        return made

    @property
    def all_units(self) -> list[Unit]:
        """Its own and its experts'."""
        return [unit for unit in (self.unit, self.inner) if unit is not None]

    @property
    def _split(self) -> Split:
        assert self.inputs is not None, "the schedule has no such backward"
        return self.inputs

    def _bytes(self, storages: Sequence[int]) -> int:
        return sum(int(self._split.tape.bytes[index, 0]) for index in storages if index not in self._lent)

    @cached_property
    def _within(self) -> list[bool]:
        """[instants]: whether an operation on the inner unit's weights runs."""
        return [self.inner is not None and name.startswith(EXPERTS) for _, name in self.tape.instants]

    def forward(self) -> Iterator[Stretch]:
        """The stretches of the forward, with the most that is alive in each."""
        return self._stretches(self._totals, 0, 0, self.tape.turn)

    def backward(self, *, added: bool, added_within: bool) -> Iterator[Stretch]:
        """The stretches of the backward, gradients of weights among what is alive.

        added   they are added into others when they reach them; _within: those of the inner unit
        """
        inner = self._gradients(within=True, added=added_within)
        outer = self._gradients(within=False, added=added)
        return self._stretches(self._totals + outer + inner, inner, self.tape.turn, len(self._totals))

    def _gradients(self, *, within: bool, added: bool) -> IntArray:
        """[instants]: gradients of the weights of the inner unit, or of the others, until they are handed over."""
        alive = np.zeros(len(self._totals), dtype=np.int64)
        over = self._last_within if within else len(alive) - 1
        for storage in self.tape.storages:
            if storage.kind == "weight gradient" and within == (self.inner is not None and _of_experts(storage)):
                last = min(over, self._reached(storage)) if added else over
                alive[storage.born : last + 1] += int(np.atleast_1d(storage.nbytes)[0])
        return alive

    def _reached(self, storage: Storage) -> int:
        """When the gradient of a weight is added to what is there.

        At once; with the input of its region; or, where a stack was turned before its first use, after the last.
        """
        if self._entries.size:
            return int(self._entries[np.searchsorted(self._entries, storage.born)]) - 1
        return self._last_within if storage.name.endswith(TURNED) else storage.born

    @cached_property
    def _entries(self) -> IntArray:
        """Instants of the backward at which a tensor-parallel region ends; the last one ends all."""
        found = [
            at for at, (phase, name) in enumerate(self.tape.instants) if phase == "backward" and name.endswith(ENTRY)
        ]
        return np.array([*found, len(self.tape.instants)] if found else [], dtype=np.int64)

    @cached_property
    def _last_within(self) -> int:
        """The last instant of the experts' own operations."""
        return max((at for at, (_, name) in enumerate(self.tape.instants) if name.startswith(EXPERTS)), default=-1)

    def _stretches(self, alive: IntArray, inner: IntArray | int, first: int, end: int) -> Iterator[Stretch]:
        """Instants that follow each other within the inner unit or without, each as one.

        inner   [instants]: gradients of the inner unit's weights, which are whoever takes them's to count at the end
        """
        last = np.array([storage.last for storage in self.tape.storages])
        rest = alive - inner
        start = first
        for at in range(first + 1, end + 1):
            if at == end or self._within[at] != self._within[start]:
                unit = self.inner if self._within[start] else None
                again = self.tape.instants[start][0] == "again"
                gone = int(self.tape.bytes[last == at - 1, 0].sum())
                yield Stretch(unit, again, int(alive[start:at].max()), int(rest[at - 1]) - gone)
                start = at


def _of_experts(storage: Storage) -> bool:
    return storage.name.startswith(EXPERTS)
