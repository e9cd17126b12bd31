"""One record of the run book: a baseline, a plan that was run at several numbers of ranks, with all that was measured.

Times are those of each step, not of means, and each has the time of a fixed reference beside it (runtime/timing).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from trainledger.reconcile.verdict import WRONG, Verdict

Scaling = Literal["weak", "strong"]
"""weak: every rank does as much at any number of ranks; strong: all ranks together do."""


LEAST_S, LONGEST_S = 1e-9, 1e9
"""No step is shorter than a tick of a clock, or longer than thirty years."""
Time = Annotated[float, Meta(ge=LEAST_S, le=LONGEST_S)]
Count = Annotated[int, Meta(ge=0, le=1 << 62)]


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it was measured: what a time depends on. `reference` is the version of the reference beside the steps."""

    host: str
    device: str
    cores: int
    torch_version: str
    reference: int


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step on the clock; a round is a start of the ranks, and counts from 0."""

    round: Count
    step: Count
    seconds: Time
    reference_work_s: Time
    reference_call_s: Annotated[float, Meta(ge=0, le=LONGEST_S)]
    reference_sum_s: Annotated[float, Meta(ge=0, le=LONGEST_S)]

    @property
    def relative(self) -> float:
        """The step in units of the reference beside it."""
        return self.seconds / (self.reference_work_s + self.reference_call_s + self.reference_sum_s)


class Rung(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The plan at one number of ranks.

    spec                   what the ranks were told (RunSpec), from which it can be run again
    tokens                 of one optimizer step, all ranks together
    flop, calls            predicted of a step of the rank with most: arithmetic and collectives
    wire_bytes             the same of the bytes that it sends by the ring algorithm
    reference_wire_bytes   what a rank sends in the reference's larger sum
    allocator_peak_bytes   of each rank, in the steps on the clock; none where there is no caching allocator
    lines                  every line of every rank, predicted and measured, with its verdict
    unexplained_bytes, unexplained_calls   of the proof: what no line claims
    """

    ranks: Annotated[int, Meta(ge=1)]
    spec: dict[str, Any]
    tokens: Annotated[int, Meta(ge=1)]
    flop: Annotated[int, Meta(ge=1)]
    calls: Count
    wire_bytes: Count
    reference_wire_bytes: Count
    allocator_peak_bytes: tuple[Count, ...]
    unexplained_bytes: Count
    unexplained_calls: Count
    lines: Annotated[tuple[Verdict, ...], Meta(min_length=1)]
    steps: Annotated[tuple[Step, ...], Meta(min_length=1)]

    @cached_property
    def rounds(self) -> dict[int, tuple[Step, ...]]:
        """The steps of each round."""
        found: dict[int, list[Step]] = {}
        for step in self.steps:
            found.setdefault(step.round, []).append(step)
        return {number: tuple(steps) for number, steps in found.items()}

    @property
    def proven(self) -> bool:
        """Whether every line was as predicted, and nothing is unexplained."""
        beyond = self.unexplained_bytes or self.unexplained_calls
        return not beyond and not any(line.verdict in WRONG for line in self.lines)

    @property
    def step_s(self) -> float:
        """Of all steps the median."""
        return statistics.median(step.seconds for step in self.steps)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of a step over its median time."""
        return self.tokens / self.step_s


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """One record.

    number     in its book; 0 while it is in none
    layout     the plan in words
    made_at    UTC, ISO 8601
    """

    name: str
    made_at: str
    model: str
    layout: str
    scaling: Scaling
    version: str
    machine: Machine
    rungs: Annotated[tuple[Rung, ...], Meta(min_length=1)]
    number: int = 0

    @property
    def by_ranks(self) -> Mapping[int, Rung]:
        """The rungs by their number of ranks."""
        return {rung.ranks: rung for rung in self.rungs}
