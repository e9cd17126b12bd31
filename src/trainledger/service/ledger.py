"""`ledger`: one plan in full. What it holds and moves, line by line, on the pipeline stage that holds most."""

from __future__ import annotations

import difflib
from typing import Annotated

import msgspec

from trainledger.account.ledger import Entry, Moved, entry
from trainledger.account.memory import Alive, Meter, memory_of
from trainledger.account.peak import by_basis
from trainledger.errors import BadInput, UsageError
from trainledger.facts.cite import reference
from trainledger.facts.model import Model
from trainledger.inventory.inventory import Inventory
from trainledger.lines import Basis, Line
from trainledger.plans.plan import Plans
from trainledger.profiles.profile import Instant
from trainledger.search.change import Change, smallest_change
from trainledger.service.common import Degrees, Note, Run, host_notes, notes, prepared
from trainledger.service.plan_file import overlay
from trainledger.service.requests import ANSWER, PlanRequest, flag
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


class PlanDegrees(Degrees, frozen=True, kw_only=True):
    """The plan, with its zero_stage."""

    zero_stage: int


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


def run(request: Request) -> Response | Explanation | Sweep:
    """The account of the plan, one line of it, or its totals while a number varies."""
    request = overlay(request)
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
    return Response(
        model=setting.model.name,
        cluster=run.cluster,
        accelerator=run.accelerator,
        profile=engine_of(run),
        plan=PlanDegrees(zero_stage=int(plans.zero_stage[0]), **msgspec.structs.asdict(run.degrees())),
        lines=found.lines,
        memory=_memory(run, plans, inventory, found),
        traffic=found.traffic,
        wire_bytes=found.wire_bytes,
        assumed=run.assumed,
        notes=(*host_notes(run, found.peak.host_bytes), *notes(run, plans)),
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
    fits = run.fits(peak)
    gbs = run.setting.workload.gbs or int(plans.num_microbatches[0] * plans.mbs[0] * plans.dp[0])
    return Memory(
        meters=found_memory.meters,
        usable_bytes=usable,
        free_bytes=usable - peak.device_bytes if usable is not None else None,
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
    )


def _explain(response: Response, wanted: str) -> Explanation:
    line = _find(response.lines, wanted)
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
