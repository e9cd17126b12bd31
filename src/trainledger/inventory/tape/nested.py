"""A tape that runs, forward and backward, inside the forward of another: a loss that is worked out chunk by chunk."""

from __future__ import annotations

from trainledger.inventory.tape.program import Program, Value
from trainledger.inventory.tape.tape import Tape


def nested(program: Program, tape: Tape, within: tuple[Value, ...] = ()) -> None:
    """Add one operation for each instant of `tape`; its storages live as they do there, and `within` all the while.

    What the inner program was given from outside counts nothing here: it is a view of what `within` names.
    """
    values = [program.value(storage.name, storage.nbytes, differentiable=False) for storage in tape.storages]
    for instant, (phase, name) in enumerate(tape.instants):
        born = tuple(v for v, s in zip(values, tape.storages, strict=True) if s.born == instant)
        there = tuple(v for v, s in zip(values, tape.storages, strict=True) if 0 <= s.born < instant <= s.last)
        program.add(f"{name}, {phase}", (*within, *there), born)
