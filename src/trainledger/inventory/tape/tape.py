"""What a walk finds: lifetimes of storages, which programs of one outline have in common, and with sizes a tape."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from trainledger.arrays import IntArray
from trainledger.inventory.tape.order import Phase
from trainledger.inventory.tape.program import Bytes

Kind = Literal["tensor", "gradient", "weight gradient", "work"]


class Life(msgspec.Struct, eq=False, gc=False):
    """A storage that is alive from instant `born` to instant `last`, both included; -1 is before the first.

    at       where its bytes are among the sizes of its program
    leaves   it outlives the tape: a gradient that goes on to whatever ran before
    """

    name: str
    at: int
    kind: Kind
    born: int
    last: int
    leaves: bool = False

    def touch(self, instant: int) -> None:
        """Still needed then."""
        self.last = max(self.last, instant)


class Storage(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A Life with its bytes."""

    name: str
    nbytes: Bytes
    kind: Kind
    born: int
    last: int
    leaves: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Lifetimes:
    """Storages of a program whatever their sizes.

    instants   (phase, operation) in order
    turn       how many of them are forward
    output     index of the storage that the part hands on; -1: it is a loss
    returned   index of the gradient of that, which whatever runs next hands back; -1: it is a loss
    factors    where among the sizes those tensors are that gradients of weights multiply, where they may be put off
    """

    instants: tuple[tuple[Phase, str], ...]
    turn: int
    lives: tuple[Life, ...]
    output: int = -1
    returned: int = -1
    factors: tuple[int, ...] = ()

    @cached_property
    def places(self) -> tuple[int, ...]:
        """[storages]: where their bytes are among the sizes."""
        return tuple([life.at for life in self.lives])

    @cached_property
    def alive(self) -> NDArray[np.bool_]:
        """[instants, storages]."""
        at = np.arange(len(self.instants))[:, None]
        born = np.array([life.born for life in self.lives])
        last = np.array([life.last for life in self.lives])
        return (born <= at) & (at <= last)

    @cached_property
    def waits(self) -> NDArray[np.bool_]:
        """[storages]: what is kept between forward and backward."""
        lives, turn = self.lives, self.turn
        return np.array([life.born < turn <= life.last and life.kind == "tensor" for life in lives], dtype=np.bool_)

    @cached_property
    def waiting(self) -> IntArray:
        """[storages]: the same as 0 and 1."""
        return self.waits.astype(np.int64)

    @cached_property
    def leaving(self) -> IntArray:
        """[storages]: 1 where a gradient goes on to whatever ran before."""
        return np.array([life.leaves for life in self.lives], dtype=np.int64)

    @cached_property
    def alive_weights(self) -> IntArray:
        """[instants, storages]: 1 where a gradient of a weight is alive."""
        chosen = np.array([life.kind == "weight gradient" for life in self.lives], dtype=np.bool_)
        return (self.alive & chosen).astype(np.int64)

    @cached_property
    def alive_others(self) -> IntArray:
        """[instants, storages]: 1 where anything else is."""
        return self.alive.astype(np.int64) - self.alive_weights


@dataclasses.dataclass(frozen=True, eq=False)
class Tape:
    """Storages with lifetimes and sizes.

    sizes     of the program, among which storages have theirs
    factors   bytes of each tensor that gradients of weights multiply, where they may be put off
    """

    lifetimes: Lifetimes
    sizes: list[Bytes]
    factors: tuple[Bytes, ...] = ()

    @property
    def instants(self) -> tuple[tuple[Phase, str], ...]:
        """(phase, operation) in order."""
        return self.lifetimes.instants

    @property
    def turn(self) -> int:
        """How many instants are forward."""
        return self.lifetimes.turn

    @property
    def output(self) -> int:
        """Index of the storage that the part hands on; -1: it is a loss."""
        return self.lifetimes.output

    @property
    def returned(self) -> int:
        """Index of the gradient of that, which whatever runs next hands back; -1: it is a loss."""
        return self.lifetimes.returned

    @property
    def alive(self) -> NDArray[np.bool_]:
        """[instants, storages]."""
        return self.lifetimes.alive

    @property
    def waits(self) -> NDArray[np.bool_]:
        """[storages]: what is kept between forward and backward."""
        return self.lifetimes.waits

    @cached_property
    def storages(self) -> tuple[Storage, ...]:
        """In the order in which they were found."""
        return tuple(
            Storage(life.name, self.sizes[life.at], life.kind, life.born, life.last, life.leaves)
            for life in self.lifetimes.lives
        )

    @cached_property
    def bytes(self) -> IntArray:
        """[storages, plans]."""
        chosen = [self.sizes[at] for at in self.lifetimes.places]
        table = np.empty((len(chosen), max(map(np.size, chosen), default=1)), dtype=np.int64)
        for index, nbytes in enumerate(chosen):
            table[index] = nbytes
        return table

    @cached_property
    def saved(self) -> IntArray:
        """[plans]: bytes kept between forward and backward."""
        return self.lifetimes.waiting @ self.bytes

    @cached_property
    def put_off(self) -> IntArray:
        """[plans]: bytes kept after a backward but for gradients of weights; all, if no operation says which."""
        if not self.factors:
            return self.saved
        return sum((np.atleast_1d(nbytes).astype(np.int64) for nbytes in self.factors), np.zeros(1, dtype=np.int64))

    @cached_property
    def handed(self) -> IntArray:
        """[plans]: what is left when the backward is over: the gradients that go on to whatever ran before."""
        return self.lifetimes.leaving @ self.bytes

    @cached_property
    def weight_gradients(self) -> IntArray:
        """[instants, plans]: gradients that the backward has given weights so far."""
        return self.lifetimes.alive_weights @ self.bytes

    @cached_property
    def totals(self) -> IntArray:
        """[instants, plans]: bytes alive, gradients of weights left out: an engine may keep those elsewhere."""
        return self.lifetimes.alive_others @ self.bytes

    def peak(self, phase: Literal["forward", "backward"], *, weights: bool = False) -> tuple[IntArray, IntArray]:
        """([plans] the most that is alive in a phase, [plans] the instant); running again belongs to the backward.

        weights   with the gradients of weights, which then lie beside the rest until the part has run
        """
        first, end = (0, self.turn) if phase == "forward" else (self.turn, len(self.instants))
        part = (self.totals + self.weight_gradients if weights else self.totals)[first:end]
        if not len(part):
            return np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        return part.max(axis=0), part.argmax(axis=0) + first

    def at(self, instant: int, plan: int = 0) -> list[tuple[str, Kind, int]]:
        """(name, kind, bytes) of what is alive at an instant, largest first."""
        alive: list[tuple[str, Kind, int]] = []
        for index, storage in enumerate(self.storages):
            nbytes = int(self.bytes[index, plan])
            if self.alive[instant, index] and nbytes:
                alive.append((storage.name, storage.kind, nbytes))
        return sorted(alive, key=lambda entry: -entry[2])


def taped(lifetimes: Lifetimes, sizes: list[Bytes]) -> Tape:
    """The lifetimes with sizes."""
    return Tape(lifetimes, sizes, tuple([sizes[at] for at in lifetimes.factors]))
