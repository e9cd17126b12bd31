"""What data parallelism gathers and reduces at once, and the least that any kind of it does: it adds gradients up."""

from __future__ import annotations

import dataclasses

from trainledger.account.memory.rank.tally import Tally


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """What is gathered and reduced at once; bytes.

    whole       its weights as gathered, padded
    cast        this rank's shard in the dtype that travels, where that is another than the weights'; else 0
    largest     the largest tensor's part of that
    fresh       gradients as a backward gives them
    widened     gradients in the dtype of reductions; widest: the largest tensor's
    reduced     what a reduction takes, padded; shard: what it gives
    last        of the fresh gradients those of the last tensor, which the reduction holds a moment longer
    tied        of the fresh gradients that of a weight which both ends of the model use
    joined      of gradients that are cut along another dimension than the first: copies before the reduction
    divided     a copy of what is reduced, where a rank alone divides it
    alone       one rank holds the whole: nothing travels, and what is computed with is a copy
    whole_pass  it has no end before the whole backward's: nothing that enters it needs a gradient
    """

    name: str
    whole: int
    cast: int
    largest: int
    fresh: int
    widened: int
    widest: int
    reduced: int
    shard: int
    last: int
    tied: int = 0
    joined: int = 0
    divided: int = 0
    alone: bool = False
    whole_pass: bool = False


class DataParallel:
    """One rank that averages nothing: gradients are added up in place. The base of the ways that do more."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.gradients: dict[str, int] = {}
        self.waiting: set[str] = set()

    def micro_batch(self, *, last: bool) -> None:
        """A micro-batch begins."""
        del last

    def enter(self, unit: Unit) -> None:
        """A unit is about to run forward."""

    def leave(self, unit: Unit) -> None:
        """A unit has run forward."""

    def turn(self) -> None:
        """The whole forward is done."""

    def accumulates(self, unit: Unit) -> bool:
        """Whether gradients of its weights are added into those that are there, one after the other."""
        return unit.name in self.gradients

    def start(self, unit: Unit) -> None:
        """A unit is about to run backward."""

    def give(self, unit: Unit, *, awaits: bool = False, joins: bool = False) -> None:
        """Gradients as a backward leaves them: new, or added to what is there.

        The two of a tied weight are one before they reach it: the first waits, and the sum is a third tensor.
        """
        if joins:
            self.tally.reach(f"both gradients of {unit.name}, added", 2 * unit.tied)
            self.tally.drop(unit.tied if unit.name in self.waiting else 0)
            self.waiting.discard(unit.name)
        elif not self.accumulates(unit):
            self.tally.add(f"gradients of {unit.name}", unit.fresh)
        elif awaits:
            self.waiting.add(unit.name)
            self.tally.add(f"gradients of {unit.name}", unit.tied)

    def again(self, unit: Unit) -> None:
        """A unit is about to run forward again, within a backward."""

    def hand_over(self, unit: Unit) -> None:
        """A unit has run backward and all its gradients are there."""
        self.gradients[unit.name] = unit.fresh

    def finish(self) -> None:
        """The whole backward is done."""

    def ask_all(self) -> None:
        """Start to gather every unit."""

    def wait_all(self) -> None:
        """Every unit is needed."""

    def reduce_all(self) -> None:
        """All micro-batches are done: what was added up is reduced."""
