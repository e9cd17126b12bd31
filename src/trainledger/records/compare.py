"""Two baselines: whether the second one may take the place of the first, and what moved.

A step is compared in units of the reference beside it, a round by the median of its steps, and two layouts by the
rounds of both. Where they took turns the rounds are pairs. The interval of the change decides:

accepted    the change is smaller than the smallest one of interest, even at the end of its interval
rejected    there is a change for the worse, at both ends of it, and it may be as large as that
undecided   the interval has both no change and one of interest: more rounds would make it narrower
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Literal

import msgspec

from trainledger.account.rank_memory import PEAK, PEAK_TOLERANCE
from trainledger.records.noise import Shift, paired, unpaired
from trainledger.records.record import Baseline, Rung, Step
from trainledger.records.scaling import middle

Word = Literal["accepted", "rejected", "undecided"]

STEADY = 1.5
"""Times by which the machine itself, by its reference, may be slower in one record than in the other: beyond it a step
in units of the reference is another one too."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A step of the second layout over one of the first, at one number of ranks, per token.

    low, estimate, high   1.2: a fifth longer; null ends where the rounds are too few for an interval
    machine               how much slower the machine was, by its reference
    """

    ranks: int
    rounds: tuple[int, int]
    low: float | None
    estimate: float
    high: float | None
    machine: float
    verdict: Word
    reason: str


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """A line that is not the same on both sides at one number of ranks: the most of any rank, null where it lacks."""

    ranks: int
    id: str
    unit: str
    a: int | None
    b: int | None


def change(a: Rung, b: Rung, *, pairs: bool, least: float, certain: float) -> Change:
    """Compare the times of one number of ranks; `least` is the smallest change of interest, 0.1 for a tenth.

    pairs   rounds of one number are pairs, which took turns
    """
    per_token = math.log(a.tokens / b.tokens)
    ours, theirs = _logs(a), _logs(b)
    if pairs:
        both = sorted(ours.keys() & theirs.keys())
        differences = [theirs[number] - ours[number] for number in both]
        shift = paired(differences, certain)
    else:
        differences = [y - x for x in ours.values() for y in theirs.values()]
        shift = unpaired(list(ours.values()), list(theirs.values()), certain)
    machine = middle(b.steps, _reference_s) / middle(a.steps, _reference_s)
    estimate = statistics.median(differences) if shift is None else shift.estimate
    word, reason = _judged(shift, per_token, least, 1.0 if pairs else machine)
    return Change(
        ranks=a.ranks,
        rounds=(len(a.rounds), len(b.rounds)),
        low=None if shift is None else math.exp(shift.low + per_token),
        estimate=math.exp(estimate + per_token),
        high=None if shift is None else math.exp(shift.high + per_token),
        machine=machine,
        verdict=word,
        reason=reason,
    )


def _logs(rung: Rung) -> dict[int, float]:
    """Of each round the logarithm of its median step, in units of the reference."""
    return {number: math.log(middle(steps, lambda step: step.relative)) for number, steps in rung.rounds.items()}


def _reference_s(step: Step) -> float:
    return step.seconds / step.relative


def _judged(shift: Shift | None, per_token: float, least: float, machine: float) -> tuple[Word, str]:
    if shift is None:
        return "undecided", "too few rounds for an interval: record more with --rounds, or use --again"
    if not 1 / STEADY <= machine <= STEADY:
        return (
            "undecided",
            f"the machine was {machine:.2f} times as slow, so that times of two records say little: use --again",
        )
    low, high = math.exp(shift.low + per_token), math.exp(shift.high + per_token)
    if high < 1 + least:
        return "accepted", ""
    if low > 1 and math.exp(shift.estimate + per_token) >= 1 + least:
        return "rejected", ""
    return "undecided", "slower by what is of interest, or by less: more rounds decide (--again, --rounds)"


def moved(a: Baseline, b: Baseline) -> Iterator[Moved]:
    """The lines of memory and traffic that are not the same, by rung; of a held line the largest at any instant."""
    ours, theirs = a.by_ranks, b.by_ranks
    for ranks in sorted(ours.keys() & theirs.keys()):
        left, right = (_largest(rung[ranks]) for rung in (ours, theirs))
        for identity, unit in {**left[1], **right[1]}.items():
            before, now = left[0].get(identity), right[0].get(identity)
            if before != now:
                yield Moved(ranks=ranks, id=identity, unit=unit, a=before, b=now)


def _largest(rung: Rung) -> tuple[dict[str, int], dict[str, str]]:
    """(measured of the rank that has most, unit) by line; held lines of a category together, rank by rank."""
    sums: dict[tuple[str, int, str], int] = {}
    units: dict[str, str] = {}
    for line in rung.lines:
        if line.measured is None or ":conserved" in line.id:
            continue
        identity = _summary(line.id)
        units[identity] = line.unit
        key = identity, line.rank, line.instant
        sums[key] = sums.get(key, 0) + line.measured
    found: dict[str, int] = {}
    for (identity, _, _), amount in sums.items():
        found[identity] = max(found.get(identity, 0), amount)
    return found, units


def _summary(identity: str) -> str:
    """The category of a held line; any other line itself.

    >>> _summary("held/weights/lm_head.weight"), _summary("moved/all_gather/bf16:in@dp_shard")
    ('held/weights', 'moved/all_gather/bf16:in@dp_shard')
    """
    return "/".join(identity.split("/")[:2]) if identity.startswith("held/") else identity


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """The highest peak of any rank at one number of ranks; `verdict` of the second side."""

    ranks: int
    a_bytes: int
    b_bytes: int
    verdict: Word


def peak(a: Rung, b: Rung) -> Peak:
    """Compare the peaks: a second one that is higher by more than a prediction may be off is a change for the worse."""
    before, now = peak_bytes(a), peak_bytes(b)
    grown = now > before * (1 + PEAK_TOLERANCE)
    return Peak(ranks=a.ranks, a_bytes=before, b_bytes=now, verdict="rejected" if grown else "accepted")


def peak_bytes(rung: Rung) -> int:
    """The highest peak of any rank: of the caching allocator, or else what was seen alive."""
    seen = [line.measured or 0 for line in rung.lines if line.id == PEAK]
    return max(rung.allocator_peak_bytes or seen, default=0)
