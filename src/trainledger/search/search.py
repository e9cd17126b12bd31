"""Try every plan, reject by rule, rank what fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from trainledger.account.memory import device_bytes, stage_memory
from trainledger.account.peak import host_holds, single_peak
from trainledger.account.traffic import wire_totals
from trainledger.arrays import FloatArray, IntArray
from trainledger.errors import MissingFact
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Plans
from trainledger.plans.setting import Setting
from trainledger.plans.space import grid
from trainledger.profiles.profile import INSTANTS
from trainledger.rules import PLANNER, REFUSALS, require, violations
from trainledger.search.change import Change, cost_of, smallest_change

CHUNK = 1 << 17
"""Plans accounted for at once: small enough that the arrays stay in cache and memory stays flat."""
PARETO_LIMIT = 20
MOST_ASKED = 3
"""Times as many plans are asked for a replay as are wanted; where none of them fits, none is taken to."""
STATES_DO_NOT_FIT, DOES_NOT_FIT = "states-do-not-fit", "does-not-fit"
"""Weights, gradients, optimizer and buffers alone are too much; or only with activations, or for the host."""


Sort = Literal["headroom", "traffic"]
"""What a plan that fits is ranked by."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One plan that fits: total_bytes are allocated, device_bytes with the context and communicators beside them.

    activations_bytes are None where a model's states alone are known. headroom_bytes are what the card
    has left of the second; wire_bytes are of all axes, per rank and optimizer step.
    """

    plan: dict[str, int]
    recompute: str
    total_bytes: int
    device_bytes: int
    states_bytes: int
    activations_bytes: int | None
    wire_bytes: int
    headroom_bytes: int
    pp_stage: int
    instant: str


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """evaluated = accepted + the sum of `rejected`, where each plan counts under the first rule it breaks.

    gbs           the global batch that all plans share, so that their traffic per step is comparable
    pareto_size   plans that no other beats in both memory and traffic; `pareto` has at most PARETO_LIMIT of them,
                  evenly spaced, both ends included
    """

    gbs: int
    evaluated: int
    accepted: int
    rejected: dict[str, int]
    plans: list[Candidate]
    pareto: list[Candidate]
    pareto_size: int
    smallest_change: Change | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """The plans of one scenario that pass every rule, with what they hold and send; `host`: the node holds its part."""

    inventory: Inventory
    plans: Plans
    total: IntArray
    states: IntArray
    host: NDArray[np.bool_]
    wire: FloatArray


Item = TypeVar("Item")
Place = tuple[_Scored, int]
"""A plan: the scored set that has it, and its row there."""


def run_search(
    base: Setting,
    *,
    gpus: int,
    fixed: Mapping[str, int],
    recomputes: tuple[str, ...],
    top: int,
    sort: Sort = "headroom",
) -> SearchResult:
    """All plans of `gpus` ranks for the setting's model and engine, under each recompute policy.

    Without a global batch one sequence per GPU is assumed.
    Raises MissingFact without a card to fit into, and Refused where one rule forbids every plan.
    """
    usable = base.usable_bytes
    if usable is None:
        raise MissingFact("a plan is ranked by the memory it leaves free: name a card with --gpu, or a --cluster")
    workload = base.workload
    gbs = workload.gbs or gpus
    base = dataclasses.replace(base, workload=msgspec.structs.replace(workload, gbs=gbs))
    rejected: dict[str, int] = {}
    plans = grid(base, gpus, fixed)
    scored = [
        part for policy in recomputes for part in _score(Inventory(base.under(recompute=policy)), plans, rejected)
    ]
    if len(rejected) == 1 and not scored:
        require(REFUSALS, base, plans.take(slice(0, 1)))
    kept, nearest = _split(scored, usable, rejected)
    ranked, front, offers = _ranked(kept, sort), _pareto(kept), _Offers(usable)
    spaced = offers.first(_spaced(front, PARETO_LIMIT), PARETO_LIMIT)
    found = _sorted(offers.first(ranked, top), sort) or _sorted(spaced, sort)
    pareto = _spaced(_unbeaten([*spaced, *found]), PARETO_LIMIT)
    refused = offers.refused if found else len(ranked)
    if refused:
        rejected[DOES_NOT_FIT] = rejected.get(DOES_NOT_FIT, 0) + refused
    return SearchResult(
        gbs=gbs,
        evaluated=len(plans) * len(recomputes),
        accepted=len(ranked) - refused,
        rejected=dict(sorted(rejected.items(), key=lambda item: -item[1])),
        plans=found,
        pareto=pareto,
        pareto_size=max(len(front) - offers.refused, len(pareto)),
        smallest_change=None if found else _smallest_change(nearest, workload, gbs),
    )


class _Offers:
    """Plans that were asked what the allocator reserves for them: a replay each, made once and for few."""

    def __init__(self, usable: int) -> None:
        self.usable = usable
        self.asked: dict[tuple[int, int], Candidate] = {}

    @property
    def refused(self) -> int:
        """How many of those that were asked do not fit after all."""
        return sum(one.headroom_bytes < 0 for one in self.asked.values())

    def first(self, places: list[Place], most: int) -> list[Candidate]:
        """The first of them that fit, `most` at most.

        When as many have been asked, those wait that leave less than the least that any needed beside.
        """
        found: list[Candidate] = []
        asked, least = 0, self.usable
        for last in (False, True):
            waiting: list[Place] = []
            for part, row in places:
                if len(found) == most or asked == MOST_ASKED * most:
                    return found
                known = int(part.total[row])
                if asked >= most and not last and self.usable - known < least:
                    waiting.append((part, row))
                    continue
                one = self._candidate(part, row)
                asked, least = asked + 1, min(least, one.device_bytes - known)
                if one.headroom_bytes >= 0:
                    found.append(one)
            places = waiting
        return found

    def _candidate(self, part: _Scored, row: int) -> Candidate:
        key = (id(part), row)
        if key not in self.asked:
            self.asked[key] = _candidate(part, row, self.usable)
        return self.asked[key]


def _unbeaten(found: list[Candidate]) -> list[Candidate]:
    """Those that no other beats in both memory and traffic, from least memory to least traffic."""
    kept: list[Candidate] = []
    for one in sorted(found, key=lambda one: (one.device_bytes, one.wire_bytes)):
        if not kept or one.wire_bytes < kept[-1].wire_bytes:
            kept.append(one)
    return kept


def _sorted(found: list[Candidate], sort: Sort) -> list[Candidate]:
    """What is reserved may turn the order of plans that leave about as much."""
    return sorted(found, key=lambda one: -one.headroom_bytes) if sort == "headroom" else found


def _spaced(front: list[Item], most: int) -> list[Item]:
    """At most `most` of a list, evenly spaced, both ends included."""
    if len(front) <= most:
        return front
    return [front[round(index * (len(front) - 1) / (most - 1))] for index in range(most)]


def _score(inventory: Inventory, plans: Plans, rejected: dict[str, int]) -> list[_Scored]:
    scored: list[_Scored] = []
    for start in range(0, len(plans), CHUNK):
        legal = _legal(inventory.setting, plans.take(slice(start, start + CHUNK)), rejected)
        if len(legal):
            memory = stage_memory(inventory, legal)
            account, total = memory.states, memory.device
            states = np.maximum.reduce([account.at(instant).max(axis=1) for instant in INSTANTS])[account.index]
            host = host_holds(inventory.setting, legal, memory)
            _, data, model = wire_totals(inventory, legal)
            wire = (data + model).max(axis=1)
            scored.append(_Scored(inventory=inventory, plans=legal, total=total, states=states, host=host, wire=wire))
    return scored


def _legal(setting: Setting, plans: Plans, rejected: dict[str, int]) -> Plans:
    open_to_blame = np.ones(len(plans), dtype=bool)
    for rule, mask in violations(PLANNER, setting, plans).items():
        blamed = int((mask & open_to_blame).sum())
        if blamed:
            rejected[rule] = rejected.get(rule, 0) + blamed
        open_to_blame &= ~mask
    return plans.take(np.nonzero(open_to_blame)[0])


def _split(scored: list[_Scored], usable: int, rejected: dict[str, int]) -> tuple[list[_Scored], list[Place]]:
    """(the part of each that fits, the plan that holds least of each zero_stage)."""
    kept: list[_Scored] = []
    nearest: dict[int, Place] = {}
    for part in scored:
        fits = (part.total <= usable) & part.host
        alone = part.states > usable
        for reason, mask in ((STATES_DO_NOT_FIT, alone), (DOES_NOT_FIT, ~fits & ~alone)):
            if mask.any():
                rejected[reason] = rejected.get(reason, 0) + int(mask.sum())
        for stage in np.unique(part.plans.zero_stage).tolist():
            rows = np.nonzero(part.plans.zero_stage == stage)[0]
            least = int(rows[np.argmin(part.total[rows])])
            if stage not in nearest or part.total[least] < nearest[stage][0].total[nearest[stage][1]]:
                nearest[stage] = (part, least)
        if fits.any():
            kept.append(_rows(part, np.nonzero(fits)[0]))
    return kept, list(nearest.values())


def _rows(part: _Scored, rows: IntArray) -> _Scored:
    return _Scored(
        inventory=part.inventory,
        plans=part.plans.take(rows),
        total=part.total[rows],
        states=part.states[rows],
        host=part.host[rows],
        wire=part.wire[rows],
    )


def _smallest_change(nearest: list[Place], workload: Workload, gbs: int) -> Change | None:
    """The cheapest change among those of the plans that come closest under each zero_stage.

    `workload` is the user's own: a global batch that was only assumed grows with the job.
    """
    cheapest: Change | None = None
    for part, row in sorted(nearest, key=lambda place: int(place[0].total[place[1]])):
        setting = dataclasses.replace(part.inventory.setting, workload=workload)
        change = smallest_change(setting, part.plans.take(slice(row, row + 1)), gbs, known=cheapest)
        cheapest = min((one for one in (cheapest, change) if one is not None), key=cost_of, default=None)
    return cheapest


def _places(kept: list[_Scored]) -> tuple[IntArray, IntArray, IntArray, FloatArray]:
    """(part, row, total, wire) of every kept plan."""
    part = np.concatenate([np.full(len(k.plans), i, dtype=np.int64) for i, k in enumerate(kept)])
    row = np.concatenate([np.arange(len(k.plans), dtype=np.int64) for k in kept])
    return part, row, np.concatenate([k.total for k in kept]), np.concatenate([k.wire for k in kept])


def _ranked(kept: list[_Scored], sort: Sort) -> list[Place]:
    """Most headroom first, of equals the one that sends less; or the other way round."""
    if not kept:
        return []
    part, row, total, wire = _places(kept)
    order = np.lexsort((wire, total) if sort == "headroom" else (total, wire))
    return [(kept[int(part[i])], int(row[i])) for i in order]


def _pareto(kept: list[_Scored]) -> list[Place]:
    """Plans that no other beats in both memory and traffic, from least memory to least traffic."""
    if not kept:
        return []
    part, row, total, wire = _places(kept)
    order = np.lexsort((wire, total))
    before = np.minimum.accumulate(np.concatenate([[np.inf], wire[order]]))[:-1]
    front = order[wire[order] < before]
    return [(kept[int(part[i])], int(row[i])) for i in front]


def _candidate(scored: _Scored, row: int, usable: int) -> Candidate:
    plans = scored.plans.take(slice(row, row + 1))
    peak = single_peak(scored.inventory, plans)
    device = device_bytes(scored.inventory, plans)
    return Candidate(
        plan=plans.row(0),
        recompute=scored.inventory.setting.scenario.recompute,
        total_bytes=peak.total_bytes,
        device_bytes=device,
        states_bytes=peak.states_bytes,
        activations_bytes=None if scored.inventory.setting.model.states_alone else peak.activations_bytes,
        wire_bytes=round(float(scored.wire[row])),
        headroom_bytes=usable - device,
        pp_stage=peak.pp_stage,
        instant=peak.instant,
    )
