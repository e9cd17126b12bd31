"""`plan`: the best plans for a model on a number of GPUs, and why the others are not among them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated

import msgspec

from trainledger.errors import UsageError
from trainledger.facts.model import Model
from trainledger.plans.limits import between
from trainledger.plans.plan import Plans, make_plans
from trainledger.rules.pipeline import uneven_layout
from trainledger.search.change import Change
from trainledger.search.search import DOES_NOT_FIT, STATES_DO_NOT_FIT, Candidate, SearchResult, Sort, run_search
from trainledger.service.common import Note, Run, notes, resolve
from trainledger.service.ledger import Engine, engine_of
from trainledger.service.plan_file import overlay
from trainledger.service.process import Process, process_since
from trainledger.service.requests import ANSWER, PlanRequest, flag

DEFAULT_TOP = 10
MOST_TOP = 1000
"""More than this is a grid, not an answer."""
MEMORY = (STATES_DO_NOT_FIT, DOES_NOT_FIT)
"""What rejects a plan that every rule lets pass."""
_FIXED = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp_replicate", "mbs")
_SEARCHED = ("recompute", "mbs", "sp")
"""Defaults of other verbs that a search does not assume, because it tries the values."""


class Request(PlanRequest, frozen=True, kw_only=True, rename="kebab"):
    """Search the plans of a number of GPUs; a degree that is given is fixed."""

    sort: Annotated[Sort | None, flag("What plans that fit are ranked by [headroom].", group=ANSWER)] = None
    top: Annotated[int | None, flag(f"How many of the best plans to show [{DEFAULT_TOP}].", "N", group=ANSWER)] = None


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """evaluated = accepted + the sum of rejected, where a plan counts under the first rule it breaks.

    passing       plans that no rule rejects, whether they fit or not
    pareto_size   plans that no other beats in both memory and traffic; `pareto` has some of them, both ends included
    wire_bytes    of a plan, over all axes, per step and rank of the pipeline stage that sends most; its other figures
                  are of the one that holds most, its pp_stage
    """

    model: str
    gpus: int
    cluster: str | None
    accelerator: str | None
    usable_bytes: int
    profile: Engine
    precision: str
    optimizer: str
    seq: int
    gbs: int
    fixed: dict[str, int]
    evaluated: int
    passing: int
    accepted: int
    rejected: dict[str, int]
    sort: Sort
    plans: list[Candidate]
    pareto: list[Candidate]
    pareto_size: int
    smallest_change: Change | None
    assumed: dict[str, str | int]
    notes: tuple[Note, ...]
    run: Process

    @property
    def exit_code(self) -> int:
        """3 when nothing fits."""
        return 0 if self.plans else 3


def run(request: Request, *, model: Model | None = None) -> Response:
    """Search, and say what was tried; `model` in place of the one that the request names."""
    start = time.perf_counter()
    request = overlay(request)
    _check(request)
    between("top", request.top, 1, MOST_TOP)
    run = resolve(request, model=model)
    fixed = _fixed(request, run)
    result = run_search(
        run.setting,
        gpus=run.gpus,
        fixed=fixed,
        recomputes=(request.recompute,) if request.recompute is not None else ("none", "full"),
        top=request.top if request.top is not None else DEFAULT_TOP,
        sort=request.sort if request.sort is not None else "headroom",
    )
    return _response(request, run, fixed, result, start)


def _check(request: Request) -> None:
    if request.gpus is None:
        raise UsageError("a search needs a number of GPUs; add --gpus, such as --gpus 64")
    if request.gpu is None and request.cluster is None:
        raise UsageError("a search needs a card to fit; add --gpu, such as --gpu h100, or --cluster")
    for name in ("dp", "dp_shard"):
        if getattr(request, name) is not None:
            flag_name = name.replace("_", "-")
            raise UsageError(
                f"--{flag_name} {getattr(request, name)}: a search derives it from the GPUs; leave it out, or fix "
                "--tp, --pp, --cp or --dp-replicate"
            )


def _fixed(request: Request, run: Run) -> dict[str, int]:
    """Columns that the user gave, which the search leaves alone."""
    fixed = {name: run.columns[name] for name in _FIXED if getattr(request, name) is not None}
    if request.sp is not None:
        fixed["sp"] = int(request.sp)
    if request.zero is not None:
        between("zero", request.zero, 0, 3)
        fixed["zero_stage"] = request.zero
    return fixed


def _shown(result: SearchResult) -> Plans | None:
    """The plans that the answer lists."""
    rows = [one.plan for one in (*result.plans, *result.pareto)]
    return make_plans({name: [row[name] for row in rows] for name in rows[0]}) if rows else None


def _batch_assumed(request: Request, result: SearchResult) -> tuple[Note, ...]:
    """What a global batch that nobody gave leaves out of a search."""
    if request.gbs is not None:
        return ()
    text = (
        f"no --gbs was given, so it is {result.gbs}, one sequence per GPU: mbs x dp must divide it, which leaves mbs 1 "
        "alone where every GPU is data-parallel, and gbs-divisible counts the rest; give --gbs as the run has it"
    )
    return (Note(rule="gbs-assumed", severity="advise", message=text),)


def _uneven_stages(run: Run, result: SearchResult, fixed: Mapping[str, int]) -> tuple[Note, ...]:
    """How pipelines are searched over which the layers do not divide, where they do not over four stages."""
    layers, split = run.setting.model.num_layers, run.setting.profile.split
    unsaid = "pp" not in fixed and result.rejected.get("layers-divisible-by-pp")
    pp = next((degree for degree in (8, 4) if run.gpus % degree == 0), 0)
    layout = uneven_layout(layers, pp) if unsaid and split == "divisible" and pp and layers % 4 else ""
    if not layout:
        return ()
    text = (
        f"{layers} layers do not divide over 4, 8 or 16 pipeline stages, so no plan here has them; a layout is "
        f"searched with its degree, such as --pp {pp} --pp-layout {layout}"
    )
    return (Note(rule="uneven-stages", severity="advise", message=text),)


def _response(request: Request, run: Run, fixed: dict[str, int], result: SearchResult, start: float) -> Response:
    setting = run.setting
    assumed = {name: value for name, value in run.assumed.items() if name not in _SEARCHED}
    if request.gbs is None:
        assumed["gbs"] = result.gbs
    usable = setting.usable_bytes
    assert setting.accelerator is not None
    assert usable is not None
    return Response(
        model=setting.model.name,
        gpus=run.gpus,
        cluster=run.cluster,
        accelerator=setting.accelerator.name,
        usable_bytes=usable,
        profile=engine_of(run),
        precision=setting.scenario.precision,
        optimizer=setting.scenario.optimizer,
        seq=setting.workload.seq,
        gbs=result.gbs,
        fixed=fixed,
        evaluated=result.evaluated,
        passing=result.evaluated - sum(n for rule, n in result.rejected.items() if rule not in MEMORY),
        accepted=result.accepted,
        rejected=result.rejected,
        sort=request.sort if request.sort is not None else "headroom",
        plans=result.plans,
        pareto=result.pareto,
        pareto_size=result.pareto_size,
        smallest_change=result.smallest_change,
        assumed=assumed,
        notes=(
            *_batch_assumed(request, result),
            *_uneven_stages(run, result, fixed),
            *notes(run, shown=_shown(result)),
        ),
        run=process_since(start),
    )
