"""How well a ladder scales, and how well it should by the ledger: each rung against the one with the fewest ranks.

Efficiency is tokens per second and rank over those of the fewest ranks. The ledger has no seconds of its own, so what
it says of efficiency is calibrated: its FLOP, calls and bytes, at the rates that the reference beside the steps had.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import msgspec

from trainledger.records.noise import Shift, paired
from trainledger.records.record import Baseline, Rung, Step

CERTAIN = 0.99
"""Of an interval: that it has the true value."""


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """Efficiency by the ledger: with all that is sent exposed, and with as much of it hidden as there is arithmetic."""

    exposed: float
    hidden: float


class Scaled(msgspec.Struct, frozen=True, kw_only=True):
    """One rung of a ladder.

    efficiency   measured, over pairs of rounds; its ends are null for the fewest ranks themselves, and where the rounds
                 are too few for an interval
    """

    ranks: int
    tokens: int
    step_s: float
    tokens_per_s: float
    efficiency: float
    efficiency_low: float | None
    efficiency_high: float | None
    predicted: Predicted


def scaled(made: Baseline) -> tuple[Scaled, ...]:
    """Every rung, the fewest ranks first."""
    base = made.rungs[0]
    return tuple(_scaled(base, rung) for rung in made.rungs)


def _scaled(base: Rung, rung: Rung) -> Scaled:
    each = [_log_efficiency(base, rung, number) for number in sorted(base.rounds.keys() & rung.rounds.keys())]
    shift: Shift | None = paired(each, CERTAIN) if rung is not base else None
    return Scaled(
        ranks=rung.ranks,
        tokens=rung.tokens,
        step_s=rung.step_s,
        tokens_per_s=rung.tokens_per_s,
        efficiency=math.exp(statistics.median(each) if shift is None else shift.estimate),
        efficiency_low=None if shift is None else math.exp(shift.low),
        efficiency_high=None if shift is None else math.exp(shift.high),
        predicted=_predicted(base, rung),
    )


def _log_efficiency(base: Rung, rung: Rung, number: int) -> float:
    ours, theirs = (middle(of.rounds[number], lambda step: step.seconds) for of in (rung, base))
    return math.log(_efficiency(base, rung, ours / theirs))


def _efficiency(base: Rung, rung: Rung, longer: float) -> float:
    """Tokens per second and rank over those of the base, where a step takes `longer` times as long."""
    return rung.tokens / base.tokens * base.ranks / rung.ranks / longer


def _predicted(base: Rung, rung: Rung) -> Predicted:
    """By FLOP, collectives and bytes alone.

    The arithmetic of the base is its step, without its communication where that is exposed; that of the rung is as much
    longer as its FLOP are more and its reference was slower. Communication is the calls at the time of a small sum, and
    the bytes at the rate of a large one.
    """
    step_s, base_sent_s = base.step_s, communication_s(base)
    longer = _reference_work_s(rung) / _reference_work_s(base) * rung.flop / base.flop
    # what the reference says takes longer than all of the base's step was faster than it says
    faster = step_s / max(base_sent_s, step_s)
    sent_s = faster * communication_s(rung)
    exposed_s = (step_s - faster * base_sent_s) * longer + sent_s
    return Predicted(
        exposed=_efficiency(base, rung, exposed_s / step_s),
        hidden=_efficiency(base, rung, max(step_s * longer, sent_s) / step_s),
    )


def communication_s(rung: Rung) -> float:
    """Seconds that the ledger's collectives of a step take at what the reference's took; 0 for one rank."""
    if not rung.calls:
        return 0.0
    call_s = middle(rung.steps, lambda step: step.reference_call_s)
    sum_s = middle(rung.steps, lambda step: step.reference_sum_s)
    per_byte_s = max(sum_s - call_s, 0.0) / rung.reference_wire_bytes
    return rung.calls * call_s + rung.wire_bytes * per_byte_s


def _reference_work_s(rung: Rung) -> float:
    return middle(rung.steps, lambda step: step.reference_work_s)


def middle(steps: Sequence[Step], what: Callable[[Step], float]) -> float:
    """The median over steps."""
    return statistics.median(map(what, steps))
