"""`check` of a plan: every rule that it breaks, and what its ledger says against it, each with evidence and a knob."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from trainledger.adapters.settings import Conflict, Settings, Unused, Used
from trainledger.checklist import CHECKS, Account, Check, Evidence, Told
from trainledger.checklist.told import Budget, budget
from trainledger.errors import BadInput, MissingFact, UsageError
from trainledger.facts.model import Model
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Plans
from trainledger.rules import RULES, WORDS, Rule, findings
from trainledger.rules.rule import Finding as Broken
from trainledger.rules.rule import Severity
from trainledger.service.common import Note, Run, notes, single_plan
from trainledger.service.ledger import Engine, PlanDegrees, engine_of, plan_degrees
from trainledger.service.plan_file import SUFFIX, merged, overlay, read_config
from trainledger.service.prove_request import DEFAULTS
from trainledger.service.requests import PlanRequest
from trainledger.service.settings import names_settings, with_settings

if TYPE_CHECKING:
    from trainledger.service.check import Request
    from trainledger.service.train_request import Request as Trained

REFUSED = 5
"""The exit code of `check` where a plan is refused."""

ORDER: dict[str, int] = {"refuse": 0, "warn": 1, "advise": 2}
LAYOUT = ("tp", "sp", "pp", "vpp", "cp", "ep", "etp", "dp_replicate", "zero_stage")
"""What a baseline has in common with a plan: it is measured at several data-parallel degrees, and at other sizes."""
CARD = ("fp8-sm", "bf16-on-volta", "card-has-dtype")
"""Of the rules about words, those about what the card can do: others can still be asked."""
THIS_MACHINE = ("runtime-ranks",)
"""Of the rules of what is run: about the machine that runs it, which need not be this one."""
NAMED = re.compile(r"(?:--(?P<flag>[a-z][a-z-]*) |\b(?P<column>[a-z_]+)=)(?P<value>\d+)\b")
"""A number of the plan as sentences write it."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that the plan breaks.

    evidence   the lines that it rests on with their amounts, or the numbers of the plan
    knob       what to turn, to what
    """

    id: str
    severity: Severity
    message: str
    knob: str
    evidence: tuple[Evidence, ...]
    source: str


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """A file of settings: the keys that made the plan, and those that change nothing, with the reason."""

    path: str
    kind: str
    used: tuple[Used, ...]
    unused: tuple[Unused, ...]


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What stands against a plan, gravest first.

    plan     null where a word of it is not the engine's
    settings the file of an engine's or launcher's own settings that the plan is from; null without one
    ledger   whether the rules that need a ledger were asked: a plan that is refused has none
    asked    how many rules were asked
    budget   what the run takes at least; null where the ledger was not asked
    """

    model: str
    cluster: str | None
    accelerator: str | None
    profile: Engine
    plan: PlanDegrees | None
    settings: Read | None
    findings: tuple[Finding, ...]
    ledger: bool
    asked: int
    budget: Budget | None
    usable_bytes: int | None
    assumed: dict[str, str | int]
    notes: tuple[Note, ...]

    @property
    def exit_code(self) -> int:
        """5 when a refusal is among the findings."""
        return REFUSED if any(one.severity == "refuse" for one in self.findings) else 0


class Stands(NamedTuple):
    """A plan once the rules that need no ledger are asked; no account where they refuse it."""

    run: Run
    plans: Plans
    asked: tuple[Rule, ...]
    found: tuple[Finding, ...]
    account: Account | None
    settings: Settings | None


class Asked(NamedTuple):
    """The plan, what a CONFIG says of its run, and the settings that it is from; None where there is none."""

    plan: PlanRequest
    trained: Trained | None = None
    settings: Settings | None = None


def check_plan(request: Request, *, model: Model | None = None) -> Checked:
    """Every rule about the plan that PLAN, CONFIG or the flags make."""
    run, plans, asked, found, account, settings = stands(request, model=model)
    said = {one.id for one in found}
    more = () if account is None else [judged(check, account) for check in CHECKS if check.id not in said]
    every = [*found, *(finding for finding in more if finding is not None)]
    return Checked(
        model=run.setting.model.name,
        cluster=run.cluster,
        accelerator=run.accelerator,
        profile=engine_of(run),
        plan=plan_degrees(run, plans) if len(asked) > len(WORDS) else None,
        settings=None
        if settings is None
        else Read(path=settings.path, kind=settings.kind, used=settings.used, unused=settings.unused),
        findings=tuple(sorted(every, key=lambda one: ORDER[one.severity])),
        ledger=account is not None,
        asked=len(asked) + len(more),
        budget=budget(account) if account is not None else None,
        usable_bytes=run.usable_bytes,
        assumed=run.assumed,
        notes=_notes(run, plans) if account is not None else (),
    )


def stands(request: Request, *, model: Model | None = None) -> Stands:
    """The plan as its own words and sizes let it stand."""
    plan, trained, settings = _asked(request, model)
    run, plans = single_plan(plan, model=model)
    asked, broken = WORDS, _broken_of(WORDS, run, plans)
    if not any(one.severity == "refuse" and one.rule not in CARD for one in broken):
        asked = tuple(rule for rule in RULES if _concerns(rule, trained=trained is not None))
        broken = _broken_of(asked, run, plans)
    own = () if settings is None else tuple(map(_conflict, settings.conflicts))
    found = (*own, *map(_finding, broken))
    account = None
    if not any(one.severity == "refuse" for one in found):
        told = _told(request, trained, settings, run, plans)
        account = Account(inventory=Inventory(run.setting), plans=plans, told=told)
    return Stands(run, plans, asked, found, account, settings)


def _broken_of(rules: tuple[Rule, ...], run: Run, plans: Plans) -> list[Broken]:
    """What a plan breaks; a fact of the card that no source states matters where no other rule refuses the plan."""
    found: list[Broken] = []
    lacking: MissingFact | None = None
    for rule in rules:
        try:
            found += findings([rule], run.setting, plans)
        except MissingFact as error:
            lacking = lacking or error
    if lacking is not None and not any(one.severity == "refuse" for one in found):
        raise lacking
    return found


def _notes(run: Run, plans: Plans) -> tuple[Note, ...]:
    """What is to be said beside the rules."""
    ids = {rule.id for rule in RULES}
    return tuple(note for note in notes(run, plans) if note.rule not in ids)


def _asked(request: Request, model: Model | None) -> Asked:
    """The plan that flags, a file of settings, a PLAN file or a CONFIG make."""
    fields = {name: getattr(request, name) for name in PlanRequest.__struct_fields__}
    over = PlanRequest(**fields)
    path = request.message if request.message is not None else request.model
    if request.message is not None and names_settings(request.message):
        plan, settings = with_settings(overlay(over), request.message, model=model)
        return Asked(plan, settings=settings)
    if path is None or not path.endswith(SUFFIX):
        return Asked(over)
    if request.message is not None and request.model is not None and request.model.endswith(SUFFIX):
        raise UsageError(f"{request.message} and --model {request.model} are two PLAN files; leave one of them out")
    given, tables = read_config(path)
    if request.message is None:
        over = msgspec.structs.replace(over, model=None)
    asked = merged(given, over)
    if not tables:
        return Asked(asked)
    from trainledger.service.train_config import configured
    from trainledger.service.train_limits import check_limits
    from trainledger.service.train_request import Request as TrainRequest

    unsaid = {name: value for name, value in DEFAULTS.items() if getattr(asked, name) is None}
    trained = configured(TrainRequest(model=path))
    check_limits(trained)
    return Asked(msgspec.structs.replace(asked, **unsaid), trained)


def _concerns(rule: Rule, *, trained: bool) -> bool:
    """Rules of what is run are asked of what is to be trained, but for those of a dry run and of this machine."""
    if rule.scope != "runtime":
        return True
    return trained and rule.id not in THIS_MACHINE and not rule.id.startswith("dry-")


def _finding(one: Broken) -> Finding:
    """A rule's sentence ends with the knob, after a semicolon or else a colon."""
    message, _, knob = one.message.rpartition("; " if "; " in one.message else ": ")
    return Finding(
        id=one.rule,
        severity=one.severity,
        message=message or knob,
        knob=knob if message else "",
        evidence=tuple(
            Evidence(line=(match["flag"] or match["column"]), amount=int(match["value"]), unit="", note="of the plan")
            for match in NAMED.finditer(message)
        ),
        source=one.source,
    )


def _conflict(one: Conflict) -> Finding:
    """What the settings themselves break."""
    return Finding(
        id=one.id,
        severity=one.severity,
        message=one.message,
        knob=one.knob,
        evidence=one.evidence,
        source=one.source,
    )


def judged(check: Check, account: Account) -> Finding | None:
    """What one rule of the ledger says."""
    found = check.found(account)
    if found is None:
        return None
    return Finding(
        id=check.id,
        severity=found.severity or check.severity,
        message=found.message,
        knob=found.knob,
        evidence=found.evidence,
        source=check.source,
    )


def _told(request: Request, trained: Trained | None, settings: Settings | None, run: Run, plans: Plans) -> Told:
    """What the flags say, and where they are silent the [run] of a CONFIG or the file of settings."""
    beside = {} if settings is None else settings.told

    def number(name: str) -> float | None:
        value = getattr(request, name)
        if value is None:
            value = getattr(trained, name, beside.get(name))
        if value is not None and not value > 0:
            raise BadInput(f"--{name.replace('_', '-')} is {value:g}: it must be above 0; write a larger number")
        return value

    tokens = number("token_budget")
    if tokens is None and trained is not None and trained.steps is not None:
        workload = run.setting.workload
        sequences = workload.gbs or int((plans.mbs * plans.num_microbatches * plans.dp)[0])
        tokens = trained.steps * sequences * workload.seq
    book, baselines = _baselines(request.book, run, plans)
    return Told(
        learning_rate=number("learning_rate"),
        loss_scaling=bool(beside.get("loss_scaling")) or None
        if request.loss_scaling is None
        else request.loss_scaling == "on",
        initial_scale=number("initial_scale"),
        tokens=None if tokens is None else int(tokens),
        usd_per_gpu_hour=number("usd_per_gpu_hour"),
        baselines=baselines,
        book=book,
    )


def _baselines(given: str | None, run: Run, plans: Plans) -> tuple[str, int | None]:
    """(the run book, how many baselines of the plan's layout it holds: None where there is no book)."""
    from trainledger.service.baseline_book import all_of, book_path

    try:
        path = book_path(given)
    except BadInput:
        if given is not None:
            raise
        return "", None
    if not path.exists():
        return given or "", None
    row, name = plans.row(0), run.setting.model.name
    alike = [
        made
        for made in all_of(given, None)
        if made.model == name
        and any(all(rung.spec["plan"].get(axis) == row[axis] for axis in LAYOUT) for rung in made.rungs)
    ]
    return given or "", len(alike)
