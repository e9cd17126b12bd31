"""Try every plan, reject by rule, rank what fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import msgspec
import numpy as np

from trainledger.account.activations import activation_bytes
from trainledger.account.ledger import peak_of, peak_totals
from trainledger.account.states import state_account
from trainledger.account.traffic import wire_totals
from trainledger.arrays import FloatArray, IntArray
from trainledger.errors import MissingFact
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Plans, Scenario
from trainledger.plans.setting import Setting
from trainledger.plans.space import grid
from trainledger.rules import PLANNER, violations
from trainledger.search.change import Change, smallest_change

CHUNK = 1 << 17
"""Plans accounted for at once: small enough that the arrays stay in cache and memory stays flat."""
PARETO_LIMIT = 20
DOES_NOT_FIT = "does-not-fit"


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One plan that fits. wire_bytes are of all axes, per rank and optimizer step."""

    plan: dict[str, int]
    recompute: str
    total_bytes: int
    states_bytes: int
    activations_bytes: int
    wire_bytes: int
    headroom_bytes: int
    pp_stage: int
    instant: str


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """evaluated = accepted + the sum of `rejected`, where each plan counts under the first rule it breaks.

    gbs   the global batch that all plans share, so that their traffic per step is comparable
    """

    gbs: int
    evaluated: int
    accepted: int
    rejected: dict[str, int]
    plans: list[Candidate]
    pareto: list[Candidate]
    smallest_change: Change | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """The plans of one scenario that pass every rule, with what they hold and send."""

    inventory: Inventory
    plans: Plans
    total: IntArray
    wire: FloatArray


def run_search(
    base: Setting, *, gpus: int, fixed: Mapping[str, int], recomputes: tuple[str, ...], top: int
) -> SearchResult:
    """All plans of `gpus` ranks for the setting's model and engine, under each recompute policy.

    Without a global batch one sequence per GPU is assumed.
    Raises MissingFact without a card to fit into.
    """
    if base.accelerator is None:
        raise MissingFact("a plan is ranked by the memory it leaves free: name a card with --gpu, or a --cluster")
    usable = base.accelerator.usable_bytes
    gbs = base.workload.gbs or gpus
    base = dataclasses.replace(base, workload=msgspec.structs.replace(base.workload, gbs=gbs))
    rejected: dict[str, int] = {}
    scored: list[_Scored] = []
    evaluated = 0
    for recompute in recomputes:
        setting = dataclasses.replace(base, scenario=with_recompute(base.scenario, recompute))
        inventory = Inventory(setting)
        plans = grid(setting, gpus, fixed)
        evaluated += len(plans)
        scored.extend(_score(inventory, plans, rejected))
    kept, nearest = _split(scored, usable, rejected)
    ranked = _ranked(kept)
    change = None
    if not ranked and nearest is not None:
        change = smallest_change(nearest[0].inventory.setting, nearest[0].plans.take(slice(nearest[1], nearest[1] + 1)))
    return SearchResult(
        gbs=gbs,
        evaluated=evaluated,
        accepted=len(ranked),
        rejected=dict(sorted(rejected.items(), key=lambda item: -item[1])),
        plans=[_candidate(*place, usable) for place in ranked[:top]],
        pareto=[_candidate(*place, usable) for place in _pareto(kept)[:PARETO_LIMIT]],
        smallest_change=change,
    )


def with_recompute(scenario: Scenario, recompute: str) -> Scenario:
    """The same scenario under another recompute policy."""
    return msgspec.structs.replace(scenario, recompute=recompute)


def _score(inventory: Inventory, plans: Plans, rejected: dict[str, int]) -> list[_Scored]:
    scored: list[_Scored] = []
    for start in range(0, len(plans), CHUNK):
        legal = _legal(inventory.setting, plans.take(slice(start, start + CHUNK)), rejected)
        if len(legal):
            total = peak_totals(state_account(inventory, legal), activation_bytes(inventory, legal))
            _, data, model = wire_totals(inventory, legal)
            wire = (data + model).max(axis=1)
            scored.append(_Scored(inventory=inventory, plans=legal, total=total, wire=wire))
    return scored


def _legal(setting: Setting, plans: Plans, rejected: dict[str, int]) -> Plans:
    open_to_blame = np.ones(len(plans), dtype=bool)
    for rule, mask in violations(PLANNER, setting, plans).items():
        blamed = int((mask & open_to_blame).sum())
        if blamed:
            rejected[rule] = rejected.get(rule, 0) + blamed
        open_to_blame &= ~mask
    return plans.take(np.nonzero(open_to_blame)[0])


def _split(
    scored: list[_Scored], usable: int, rejected: dict[str, int]
) -> tuple[list[_Scored], tuple[_Scored, int] | None]:
    """(the part of each that fits, the plan that holds least)."""
    kept: list[_Scored] = []
    nearest: tuple[_Scored, int] | None = None
    for part in scored:
        fits = part.total <= usable
        if (over := int((~fits).sum())) > 0:
            rejected[DOES_NOT_FIT] = rejected.get(DOES_NOT_FIT, 0) + over
        least = int(np.argmin(part.total))
        if nearest is None or part.total[least] < nearest[0].total[nearest[1]]:
            nearest = (part, least)
        rows = np.nonzero(fits)[0]
        if len(rows):
            kept.append(
                _Scored(
                    inventory=part.inventory, plans=part.plans.take(rows), total=part.total[rows], wire=part.wire[rows]
                )
            )
    return kept, nearest


def _places(kept: list[_Scored]) -> tuple[IntArray, IntArray, IntArray, FloatArray]:
    """(part, row, total, wire) of every kept plan."""
    part = np.concatenate([np.full(len(k.plans), i, dtype=np.int64) for i, k in enumerate(kept)])
    row = np.concatenate([np.arange(len(k.plans), dtype=np.int64) for k in kept])
    return part, row, np.concatenate([k.total for k in kept]), np.concatenate([k.wire for k in kept])


def _ranked(kept: list[_Scored]) -> list[tuple[_Scored, int]]:
    """Most headroom first; of equals the one that sends less."""
    if not kept:
        return []
    part, row, total, wire = _places(kept)
    order = np.lexsort((wire, total))
    return [(kept[int(part[i])], int(row[i])) for i in order]


def _pareto(kept: list[_Scored]) -> list[tuple[_Scored, int]]:
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
    peak = peak_of(state_account(scored.inventory, plans), activation_bytes(scored.inventory, plans))
    return Candidate(
        plan=plans.row(0),
        recompute=scored.inventory.setting.scenario.recompute,
        total_bytes=peak.total_bytes,
        states_bytes=peak.states_bytes,
        activations_bytes=peak.activations_bytes,
        wire_bytes=round(float(scored.wire[row])),
        headroom_bytes=usable - peak.total_bytes,
        pp_stage=peak.pp_stage,
        instant=peak.instant,
    )
