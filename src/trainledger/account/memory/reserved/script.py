"""What the allocator is asked for while one part of a model runs: a tape as requests in order."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import numpy as np

from trainledger.inventory.tape import Tape

Request = tuple[Literal["alloc", "free"], int, int]
"""(op, index of the storage in its tape, bytes)."""


class Phase(NamedTuple):
    """One pass over a part.

    input_free, returned_free   where among the requests the input, or the gradient that was handed back, is let go of;
                                -1: not in this phase
    """

    requests: tuple[Request, ...]
    input_free: int
    returned_free: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script:
    """Requests of a tape for one plan. What others make, or take over, is not among them.

    size         how many storages the tape has
    input        index of the storage that it reads and another part made, and its bytes; -1: it reads none
    output       of what it hands on; -1: none
    keeps_output until its own backward, so that whoever reads it must not let go of it
    returned     of the gradient of that; -1: none
    leaves       of the gradient that it hands back in turn; -1: none
    gradients    of its weights: (index, bytes), left for whoever reduces them
    late         bytes of what gradients of weights multiply, kept where those are put off; of all, if it cannot say
    more         bytes that such gradients keep beside all that waits for a backward
    """

    size: int
    input: int
    input_bytes: int
    output: int
    output_bytes: int
    keeps_output: bool
    returned: int
    leaves: int
    gradients: tuple[tuple[int, int], ...]
    late: tuple[int, ...]
    more: int
    forward: Phase
    backward: Phase


def script_of(tape: Tape, plan: int, *, gradients: bool) -> Script:
    """The requests of a tape for one of its plans; `gradients`: those of weights are storages of their own."""
    storages = tape.storages
    column = tape.bytes[:, plan if tape.bytes.shape[1] > 1 else 0] if storages else []
    sizes = [int(nbytes) for nbytes in column]
    weights = [i for i, storage in enumerate(storages) if storage.kind == "weight gradient"]
    given = 0 if storages and storages[0].born < 0 else -1
    leaves = next((i for i, storage in enumerate(storages) if storage.leaves), -1)
    keeps = tape.output >= 0 and storages[tape.output].last >= tape.turn
    there = {i for i, nbytes in enumerate(sizes) if nbytes}
    made = there - {given, tape.returned} - (set() if gradients else set(weights))
    dropped = there - {leaves, *weights} - (set() if keeps else {tape.output})
    phases = _phases(tape, sizes, made, dropped, given)
    factors = tape.factors or ((tape.saved,) if tape.output >= 0 else ())
    late = tuple(int(np.atleast_1d(nbytes)[plan if np.size(nbytes) > 1 else 0]) for nbytes in factors)
    saved = int(tape.saved[plan if tape.saved.size > 1 else 0])
    return Script(
        size=len(storages),
        input=given,
        input_bytes=sizes[given] if given >= 0 else 0,
        output=tape.output,
        output_bytes=sizes[tape.output] if tape.output >= 0 else 0,
        keeps_output=keeps,
        returned=tape.returned,
        leaves=leaves,
        gradients=tuple((i, sizes[i]) for i in weights if sizes[i]) if gradients else (),
        late=late,
        more=max(sum(late) - saved, 0) if tape.factors and tape.output >= 0 else 0,
        forward=phases[0],
        backward=phases[1],
    )


def _phases(tape: Tape, sizes: list[int], made: set[int], dropped: set[int], given: int) -> tuple[Phase, Phase]:
    """Forward and backward: at each instant what it makes, then what nobody needs after it.

    What comes from outside beside the input, such as labels, is made at the first instant.
    """
    born: list[list[int]] = [[] for _ in tape.instants]
    dead: list[list[int]] = [[] for _ in tape.instants]
    for i, storage in enumerate(tape.storages):
        if i in made:
            born[max(storage.born, 0)].append(i)
        if i in dropped:
            dead[max(storage.last, 0)].append(i)

    def phase(first: int, end: int) -> Phase:
        requests: list[Request] = []
        at = {given: -1, tape.returned: -1}
        for instant in range(first, end):
            requests.extend(("alloc", i, sizes[i]) for i in born[instant])
            for i in dead[instant]:
                if i in at:
                    at[i] = len(requests)
                requests.append(("free", i, 0))
        return Phase(tuple(requests), at[given], at[tape.returned])

    return phase(0, tape.turn), phase(tape.turn, len(tape.instants))
