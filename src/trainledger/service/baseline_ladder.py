"""From one layout to the runs of its ladder: the same plan at several numbers of ranks, each passed by every rule.

What changes from rung to rung is the data-parallel degree, and with it the batch (weak scaling) or the micro-batches of
a rank (strong scaling). A model that is made small is made so once, for the most ranks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from trainledger.errors import UsageError
from trainledger.plans.limits import between
from trainledger.plans.plan import DEGREE_LIMIT
from trainledger.plans.ranks import world_size
from trainledger.service.baseline_request import MOST_ROUNDS, MOST_STEPS, LadderRequest
from trainledger.service.plan_file import overlay
from trainledger.service.prove_plan import Found, Planned, planned
from trainledger.service.prove_request import ProgramRequest, Request

RANKS = (1, 2, 4, 8)
"""Of a ladder that nobody said: those of them that the degrees divide, else the fewest that they do."""
PLACED = ("gpus", "dp", "dp_shard")
"""Flags that say how many ranks there are, which a ladder does itself."""


def ladder(request: LadderRequest) -> tuple[Planned, ...]:
    """The runs, the fewest ranks first; nothing is started, and torch is not imported."""
    _check(request)
    request = overlay(request)
    counts = _counts(request)
    if counts is None:
        return (_whole(request) if not request.shrink else planned(_plain(request)),)
    base = msgspec.structs.replace(request, gpus=None, dp=None, dp_shard=None)
    rungs = [_whole(one) for one in _scaled(base, counts)]
    if not request.shrink:
        return tuple(rungs)
    return tuple(_shrunken(base, counts, rungs))


def _check(request: LadderRequest) -> None:
    between("rounds", request.rounds, 1, MOST_ROUNDS)
    between("steps", request.steps, 1, MOST_STEPS)
    if request.ranks is None:
        return
    given = [f"--{name.replace('_', '-')}" for name in PLACED if getattr(request, name) is not None]
    if given:
        raise UsageError(f"--ranks says how many ranks there are, and so does {given[0]}; leave one of them out")
    for count in request.ranks:
        between("ranks", count, 1, DEGREE_LIMIT)
    twice = sorted({count for count in request.ranks if request.ranks.count(count) > 1})
    if twice:
        raise UsageError(f"--ranks names {twice[0]} more than once; give each number once")


def _counts(request: LadderRequest) -> tuple[int, ...] | None:
    """The numbers of ranks; None where the plan has one of its own and nobody asks for others."""
    if request.ranks is None and any(getattr(request, name) is not None for name in PLACED):
        return None
    axes = {name: getattr(request, name) or 1 for name in ("tp", "pp", "cp", "dp_replicate")}
    unit = math.prod(axes.values())
    if request.ranks is None:
        fewest = math.lcm(unit, axes["tp"] * axes["pp"] * (request.ep or 1))
        return tuple(count for count in RANKS if count % fewest == 0) or (fewest,)
    for count in request.ranks:
        if count % unit:
            said = " x ".join(f"{name.replace('_', '-')} {degree}" for name, degree in axes.items() if degree > 1)
            raise UsageError(f"--ranks {count} is not a multiple of {said} = {unit}; change it, or a degree")
    return tuple(sorted(request.ranks))


def _scaled(request: LadderRequest, counts: Sequence[int]) -> list[LadderRequest]:
    """A request for each number of ranks, with its batch."""
    if request.scaling == "strong":
        gbs = request.gbs if request.gbs is not None else _common_batch(request, counts)
        return [msgspec.structs.replace(request, gpus=count, gbs=gbs) for count in counts]
    found: list[LadderRequest] = []
    for count in counts:
        gbs = request.gbs
        if gbs is not None:
            if gbs * count % counts[0]:
                raise UsageError(
                    f"--gbs {gbs} at {counts[0]} ranks is no whole number at {count}; raise --gbs, or change --ranks"
                )
            gbs = gbs * count // counts[0]
        found.append(msgspec.structs.replace(request, gpus=count, gbs=gbs))
    return found


def _common_batch(request: LadderRequest, counts: Sequence[int]) -> int:
    """The smallest batch that every number of ranks divides, with two micro-batches per stage at the most ranks."""
    degrees = [getattr(request, name) or 1 for name in ("tp", "pp", "cp")]
    shares = [(request.mbs or 1) * (count // math.prod(degrees)) for count in counts]
    return math.lcm(*shares[:-1], 2 * degrees[1] * shares[-1])


def _plain(request: LadderRequest, **changed: Any) -> Request:  # noqa: ANN401 - fields of several types
    """The request of `prove` with the same flags; its steps are those that it observes."""
    fields: dict[str, Any] = {name: getattr(request, name) for name in ProgramRequest.__struct_fields__}
    return Request(**{**fields, **changed})


def _whole(request: LadderRequest) -> Planned:
    """The run at the sizes that were asked for."""
    return planned(_plain(request, full_size=True))


def _shrunken(request: LadderRequest, counts: Sequence[int], rungs: Sequence[Planned]) -> list[Planned]:
    """The same runs of the model that is made small for the most ranks, with micro-batches in the same ratio."""
    most = planned(_plain(request, gpus=counts[-1], gbs=rungs[-1].spec.sequences_per_step))
    small, row = most.spec, most.spec.plan
    model: Found = dict(small.config), small.model
    sizes: dict[str, Any] = {"seq": small.seq, "mbs": row["mbs"], "pp_layout": small.pp_layout or None}
    gbs = small.sequences_per_step
    found: list[Planned] = []
    for count, rung in zip(counts, rungs, strict=True):
        here = gbs if request.scaling == "strong" else gbs * count // counts[-1]
        plain = _plain(request, full_size=True, gpus=count, gbs=here, **sizes)
        now = planned(plain, model)
        found.append(dataclasses.replace(now, asked=rung.asked, shrunken=most.shrunken))
    return found


def ranks_of(plan: Planned) -> int:
    """The number of ranks of a rung."""
    return world_size(plan.spec.plan)
