"""`ledger`: one plan in full. What it holds and moves, line by line, on the pipeline stage that holds most."""

from __future__ import annotations

import difflib
from typing import Annotated

import msgspec

from trainledger.account.ledger import Entry, Moved, entry
from trainledger.account.memory import Alive, Meter, memory_of
from trainledger.account.memory.answers.breakdown import StageParts, breakdown
from trainledger.account.memory.answers.limits import limits, most_params
from trainledger.account.memory.outside import Outside, outside
from trainledger.account.peak import by_basis
from trainledger.errors import BadInput, UsageError
from trainledger.facts.by_hand import model_from_count
from trainledger.facts.cite import reference
from trainledger.facts.model import Model
from trainledger.inventory.inventory import Inventory
from trainledger.lines import Basis, Line
from trainledger.plans.plan import Plans, data_parallel_degree, make_plans
from trainledger.profiles.profile import Instant
from trainledger.search.change import Change, smallest_change
from trainledger.service.common import Degrees, Note, Run, host_notes, notes, prepared
from trainledger.service.outside import outside_notes
from trainledger.service.plan_file import overlay
from trainledger.service.requests import ANSWER, ModelRequest, PlanRequest, flag
from trainledger.service.sweep import Row, sweep_rows, sweep_values

MOST_ALIVE = 12
"""Storages that an answer names: the rest is small."""


class Request(PlanRequest, frozen=True, kw_only=True, rename="kebab"):
    """One plan in full: every line it holds and moves, with its formula and source."""

    explain: Annotated[str | None, flag("Show one line: its id, or a part that only it has.", "LINE", group=ANSWER)] = (
        None
    )
    sweep: Annotated[
        str | None,
        flag("Vary one number: gpus=8..4096 doubles, mbs=1,2,4 takes each.", "FLAG=VALUES", group=ANSWER),
    ] = None
    fit_params: Annotated[
        bool | None,
        flag("Leave MODEL out, and be told the most parameters whose states fit the card.", group=ANSWER),
    ] = None


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """Whose accounting this is."""

    engine: str
    framework: str
    framework_version: str
    source: str


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Device memory of the stage that holds most.

    meters           what PyTorch has allocated, and what nvidia-smi shows, as an estimate within bounds
    free_bytes       what the card has left of its usable memory; negative where the plan does not fit
    place            where in the step most is held, in words
    alive            what is alive there, largest first
    by_category      each at its own largest instant, activations included
    by_basis         what makes up what is allocated, by how sure it is
    at_instants      all that is alive at each instant
    smallest_change  where the plan does not fit, the cheapest single change that makes it fit
    stages           every distinct pipeline stage at its own highest place, in parts that sum to the device meter
    largest_mbs      the largest micro-batch that fits the card, all else as it is; of those that divide --gbs
    longest_seq      the longest sequence, a multiple of 256
    outside          what the run holds outside of its steady step: as it loads, steps first and saves, and on its hosts
    """

    meters: dict[str, Meter]
    usable_bytes: int | None
    free_bytes: int | None
    pp_stage: int
    place: str
    instant: str
    fits: bool | None
    alive: tuple[Alive, ...]
    by_category: dict[str, int]
    by_basis: dict[Basis, int]
    at_instants: dict[Instant, int]
    host_bytes: int
    smallest_change: Change | None
    stages: tuple[StageParts, ...]
    largest_mbs: int | None
    longest_seq: int | None
    outside: tuple[Outside, ...]


class PlanDegrees(Degrees, frozen=True, kw_only=True):
    """The plan, with its zero_stage."""

    zero_stage: int


def plan_degrees(run: Run, plans: Plans) -> PlanDegrees:
    """The one plan of a run, as answers repeat it."""
    return PlanDegrees(zero_stage=int(plans.zero_stage[0]), **msgspec.structs.asdict(run.degrees()))


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The account of one plan on the pipeline stage that holds most, memory.pp_stage.

    wire_bytes   the sum of `traffic`: over all axes, per optimizer step and rank of that stage
    """

    model: str
    cluster: str | None
    accelerator: str | None
    profile: Engine
    plan: PlanDegrees
    lines: tuple[Line, ...]
    memory: Memory
    traffic: tuple[Moved, ...]
    wire_bytes: int
    assumed: dict[str, str | int]
    notes: tuple[Note, ...]

    @property
    def exit_code(self) -> int:
        """3 when it does not fit the card."""
        return 3 if self.memory.fits is False else 0


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """A cited key and where it comes from."""

    key: str
    text: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a plan's account."""

    model: str
    line: Line
    references: tuple[Reference, ...]

    @property
    def exit_code(self) -> int:
        """An explanation does not ask whether the plan fits."""
        return 0


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """The totals of a plan while one of its numbers varies.

    wire_bytes   of a row, over all axes, per step and rank of the pipeline stage that sends most; the other figures
                 are of the one that holds most, its pp_stage
    """

    model: str
    cluster: str | None
    accelerator: str | None
    profile: Engine
    usable_bytes: int | None
    sweep: str
    rows: tuple[Row, ...]
    assumed: dict[str, str | int]

    @property
    def exit_code(self) -> int:
        """3 when there is a card and no row fits it."""
        return 3 if self.usable_bytes is not None and not any(row.fits for row in self.rows) else 0


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """The most parameters whose states fit a card, tp x pp ranks holding equal parts of them."""

    fit_params: int
    accelerator: str | None
    cluster: str | None
    usable_bytes: int
    profile: Engine
    plan: PlanDegrees
    assumed: dict[str, str | int]

    @property
    def exit_code(self) -> int:
        """3 when not one parameter fits."""
        return 0 if self.fit_params else 3


def run(request: Request) -> Response | Explanation | Sweep | Fit:
    """The account of the plan, one line of it, its totals while a number varies, or the most parameters that fit."""
    request = overlay(request)
    if request.fit_params:
        return _fit(request)
    if request.sweep is not None:
        if request.explain is not None:
            raise UsageError("--explain shows a line of one plan and --sweep makes many; leave one of them out")
        return _sweep(request, request.sweep)
    response = account(request)
    return response if request.explain is None else _explain(response, request.explain)


def account(request: PlanRequest, *, model: Model | None = None) -> Response:
    """The account of one plan; `model` in place of the one that the request names."""
    run, plans, inventory = prepared(request, model=model)
    found = entry(inventory, plans)
    setting = run.setting
    memory = _memory(run, plans, inventory, found)
    return Response(
        model=setting.model.name,
        cluster=run.cluster,
        accelerator=run.accelerator,
        profile=engine_of(run),
        plan=plan_degrees(run, plans),
        lines=found.lines,
        memory=memory,
        traffic=found.traffic,
        wire_bytes=found.wire_bytes,
        assumed=run.assumed,
        notes=(
            *host_notes(run, found.peak.host_bytes),
            *outside_notes(run, memory.outside, memory.at_instants["rest"]),
            *notes(run, plans),
        ),
    )


def engine_of(run: Run) -> Engine:
    """Whose accounting a run is under."""
    profile = run.setting.profile
    return Engine(
        engine=profile.name,
        framework=profile.framework,
        framework_version=profile.framework_version,
        source=profile.source,
    )


def _memory(run: Run, plans: Plans, inventory: Inventory, found: Entry) -> Memory:
    peak, usable = found.peak, run.usable_bytes
    found_memory = memory_of(inventory, plans, found.stages)
    meters = found_memory.meters
    device = meters.get("device", meters["allocated"]).estimate
    fits = run.fits(device, peak.host_bytes)
    gbs = run.setting.workload.gbs or int(plans.num_microbatches[0] * plans.mbs[0] * plans.dp[0])
    most = limits(inventory, plans) if usable is not None else None
    return Memory(
        meters=meters,
        usable_bytes=usable,
        free_bytes=usable - device if usable is not None else None,
        pp_stage=peak.pp_stage,
        place=peak.place,
        instant=peak.instant,
        fits=fits,
        alive=found_memory.alive[:MOST_ALIVE],
        smallest_change=smallest_change(run.setting, plans, gbs) if fits is False else None,
        by_category={**peak.by_category, "activations": peak.activations_bytes},
        by_basis=by_basis(inventory, plans, peak),
        at_instants=peak.at_instants,
        host_bytes=peak.host_bytes,
        stages=breakdown(found.stages, usable, found_memory.meters),
        largest_mbs=most.largest_mbs if most is not None else None,
        longest_seq=most.longest_seq if most is not None else None,
        outside=outside(inventory, found.own, found.stages),
    )


def _fit(request: Request) -> Fit:
    """A single parameter stands for the model while the plan is read; ranks that cut a tensor have equal parts."""
    for name in ("explain", "sweep", *ModelRequest.__struct_fields__):
        if getattr(request, name) is not None:
            flag_name = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
            raise UsageError(f"--fit-params looks for the size of a model; leave {flag_name} out")
    if request.gpu is None and request.cluster is None:
        raise UsageError("--fit-params needs a card to fit; add --gpu, such as --gpu h100, or --cluster")
    tp, pp = request.tp or 1, request.pp or 1
    gpus = request.gpus
    if gpus is not None:
        gpus = data_parallel_degree(gpus, tp, pp, 1)
    alone = msgspec.structs.replace(request, tp=None, pp=None, sp=None, gpus=gpus)
    run, plans, _ = prepared(alone, model=model_from_count(1))
    usable = run.usable_bytes
    assert usable is not None
    degrees = plan_degrees(run, plans)
    return Fit(
        fit_params=most_params(run.setting, make_plans({**plans.row(0), "tp": tp, "pp": pp}), usable),
        accelerator=run.accelerator,
        cluster=run.cluster,
        usable_bytes=usable,
        profile=engine_of(run),
        plan=msgspec.structs.replace(degrees, tp=tp, pp=pp, gpus=run.gpus * tp * pp),
        assumed={name: value for name, value in run.assumed.items() if name not in ("seq", "mbs", "recompute", "gpus")},
    )


def _explain(response: Response, wanted: str) -> Explanation:
    lines = response.lines
    if not any(wanted in line.id for line in lines):
        lines = (*lines, *(one.line for one in response.memory.outside))
    line = _find(lines, wanted)
    return Explanation(
        model=response.model,
        line=line,
        references=tuple(Reference(key=key, text=reference(key)) for key in line.cites),
    )


def _find(lines: tuple[Line, ...], wanted: str) -> Line:
    """The line with this id, or the only one whose id holds the text."""
    by_id = {line.id: line for line in lines}
    if wanted in by_id:
        return by_id[wanted]
    holding = [name for name in by_id if wanted in name]
    if len(holding) == 1:
        return by_id[holding[0]]
    if holding:
        more = f" and {len(holding) - 5} more" if len(holding) > 5 else ""
        raise BadInput(
            f"--explain {wanted} is part of {len(holding)} lines: {', '.join(holding[:5])}{more}; give more of one"
        )
    near = difflib.get_close_matches(wanted, by_id, n=3, cutoff=0.0)
    raise BadInput(f"--explain {wanted} is no line of this plan; nearest: {', '.join(near)}")


def _sweep(request: Request, text: str) -> Sweep:
    name, values = sweep_values(text)
    rows, run = sweep_rows(request, name, values)
    setting = run.setting
    return Sweep(
        model=setting.model.name,
        cluster=run.cluster,
        accelerator=run.accelerator,
        profile=engine_of(run),
        usable_bytes=run.usable_bytes,
        sweep=name,
        rows=rows,
        assumed={key: value for key, value in run.assumed.items() if key != name},
    )
