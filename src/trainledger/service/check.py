"""`check`: a plan against every rule, or an out-of-memory message explained by the plan that met it."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from trainledger.account.memory import Alive, Memory, StageMemory, alive_at, memory_of, stage_memory
from trainledger.account.memory.answers.storages import storages
from trainledger.adapters.out_of_memory import Further, Log, OutOfMemory, asks_for_memory, read_log
from trainledger.errors import BadInput, UsageError
from trainledger.facts.model import Model
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Plans
from trainledger.reconcile.out_of_memory import Candidate, Explained, Inversion, Share, explain, full_of
from trainledger.service.checked import Checked, check_plan
from trainledger.service.common import Note, Run, notes, prepared
from trainledger.service.ledger import Engine, PlanDegrees, engine_of, plan_degrees
from trainledger.service.plan_file import SUFFIX, overlay
from trainledger.service.requests import ANSWER, INPUT, MODEL, RUN, PlanRequest, Switch, flag
from trainledger.service.settings import is_model, names_settings, with_settings
from trainledger.units import format_bytes

FOUND = 5
"""The exit code of `check` where it found what it was asked about."""

MOST_ALIVE = 8
MORE_THAN_PLANNED = 1.1
"""Above so much of the plan's own peak, what was allocated is not of this plan."""
OUTSIDE_BYTES = 1 << 30
"""Beyond what context and communicators are expected to take, so much more is worth a sentence."""
SETTINGS = (".json", ".yaml", ".yml")
"""How names of files end in which DeepSpeed, Accelerate and others are told what to do."""
LONGEST_LOG = 1 << 28
"""Bytes of a log that are read: more is no message."""


class Request(PlanRequest, frozen=True, kw_only=True, rename="kebab"):
    """What stands against a plan, with evidence and knobs; or, of an out-of-memory message, which tensor asked.

    Without MESSAGE the flags make the plan.
    """

    message: Annotated[
        str | None,
        flag(
            "A PLAN file or a CONFIG (.toml) to check; DeepSpeed's JSON, accelerate's or a trainer's YAML, or "
            "torchtitan's TOML; a launch command in quotes, or a script (.sh); or an out-of-memory message in quotes, "
            "or a file that has some, such as a log.",
            "PLAN|MESSAGE",
            group=INPUT,
            positional=True,
        ),
    ] = None
    model: Annotated[
        str | None,
        flag("The model that is trained, or a PLAN file (.toml); as MODEL of other verbs.", "MODEL", group=MODEL),
    ] = None
    learning_rate: Annotated[float | None, flag("Learning rate of the run, where it is high.", "X", group=RUN)] = None
    loss_scaling: Annotated[Switch | None, flag("Whether losses are scaled before the backward.", group=RUN)] = None
    initial_scale: Annotated[float | None, flag("By how much losses are scaled at first.", "X", group=RUN)] = None
    token_budget: Annotated[float | None, flag("Tokens that the whole run sees, such as 1e12.", "N", group=RUN)] = None
    usd_per_gpu_hour: Annotated[float | None, flag("What one GPU costs in an hour.", "USD", group=RUN)] = None
    book: Annotated[str | None, flag("The run book in which a baseline is looked for.", "FILE", group=RUN)] = None
    tensor: Annotated[
        str | None,
        flag(
            "Which tensor was asked for, where you know it, such as logits: then what would give it that size.",
            "NAME",
            group=ANSWER,
        ),
    ] = None


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The message as it was read: bytes, null where it does not say; at_least and at_most bound `requested`."""

    text: str
    device: str
    index: int | None
    requested: str
    at_least: int
    at_most: int
    total_bytes: int | None
    free_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None


class Other(msgspec.Struct, frozen=True, kw_only=True):
    """A message of the same log that asks for another size; `candidate` is what most likely asked, null where none."""

    requested: str
    at_least: int
    at_most: int
    index: int | None
    times: int
    candidate: Candidate | None


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """A place of the plan's step, what is allocated there, and what that is, largest first."""

    place: str
    pp_stage: int
    allocated_bytes: int
    alive: tuple[Alive, ...]


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """Which storages of the plan have the size that was asked for, and what memory was full of.

    repeats      how many further messages of the log ask for the same
    others       those that ask for another size
    full_of      what the message says that the device held
    candidates   storages of the size that was asked for: those that the traceback speaks of first, then those that the
                 plan as given makes, each by how exactly it has the size
    nearest      where there is none, the nearest in size
    inversions   of a tensor that was named, by --tensor or by the traceback, and has another size: what gives this one
    moment       the place of the plan's step that has nearly as much allocated as the message says; null if unsaid
    peak         where the plan holds most
    fits         whether the plan fits its card at all; null without a card
    """

    model: str
    accelerator: str | None
    profile: Engine
    plan: PlanDegrees
    message: Asked
    repeats: int
    others: tuple[Other, ...]
    full_of: tuple[Share, ...]
    named: str
    candidates: tuple[Candidate, ...]
    nearest: tuple[Candidate, ...]
    inversions: tuple[Inversion, ...]
    moment: Moment | None
    peak: Moment
    usable_bytes: int | None
    fits: bool | None
    assumed: dict[str, str | int]
    notes: tuple[Note, ...]

    @property
    def exit_code(self) -> int:
        """5 when the request is explained."""
        return FOUND if self.candidates or (self.named and self.inversions) else 0


def run(request: Request, *, model: Model | None = None) -> Response | Checked:
    """Check the plan, or explain the message."""
    given = request.message
    if given is None and request.model is None and model is None:
        raise UsageError(
            "check needs something to check: PLAN.toml, the flags of a plan (--model ...), or an out-of-memory MESSAGE"
        )
    if given is None or _planned(given):
        if request.tensor is not None:
            raise UsageError("--tensor is of an out-of-memory message; leave it out, or give the MESSAGE")
        return check_plan(request, model=model)
    return explained(request, given, model=model)


def explained(request: Request, given: str, *, model: Model | None = None) -> Response:
    """Which storages of the plan have the size that a message asks for."""
    # a pipe is read once
    text = _text(given)
    log = _read(given, text)
    message = log.first
    run, plans, inventory = prepared(_planned_by(request, text), model=model)
    explains = _explainer(run, plans, inventory)
    found = explains(message, request.tensor or "")
    stages = stage_memory(inventory, plans)
    memory, usable = memory_of(inventory, plans, stages), run.usable_bytes
    device = memory.meters.get("device", memory.meters["allocated"]).estimate
    return Response(
        model=run.setting.model.name,
        accelerator=run.accelerator,
        profile=engine_of(run),
        plan=plan_degrees(run, plans),
        message=_asked(message),
        repeats=log.repeats,
        others=tuple(_other(one, explains(one.message, "")) for one in log.further),
        full_of=full_of(message),
        named=found.named,
        candidates=found.candidates,
        nearest=found.nearest,
        inversions=found.inversions,
        moment=_moment(stages, message.allocated),
        peak=_peak(memory),
        usable_bytes=usable,
        fits=device <= usable if usable is not None else None,
        assumed=run.assumed,
        notes=(*_said(message, run, memory, device), *_on_host(message, found.candidates), *notes(run, plans)),
    )


def _planned_by(request: Request, text: str) -> PlanRequest:
    """The plan of the flags, or where they name no model, of a launch command that stands beside the message."""
    asked = overlay(request)
    if asked.model is None and asked.hidden is None and names_settings(text):
        return with_settings(asked, text)[0]
    return asked


def _explainer(run: Run, plans: Plans, inventory: Inventory) -> Callable[[OutOfMemory, str], Explained]:
    """What a message comes to under the plan, whose storages are listed once; the text names a tensor."""
    stored, row, seq = storages(inventory, plans), plans.row(0), run.setting.workload.seq
    tokens = int(plans.tokens(seq)[0])

    def explains(message: OutOfMemory, tensor: str) -> Explained:
        return explain(message, stored, tensor=tensor, tokens=tokens, mbs=row["mbs"], cp=row["cp"], seq=seq)

    return explains


def _other(one: Further, found: Explained) -> Other:
    asked = one.message.requested
    return Other(
        requested=asked[0].text,
        at_least=min(span.at_least for span in asked),
        at_most=max(span.at_most for span in asked),
        index=one.message.index,
        times=one.times,
        candidate=found.candidates[0] if found.candidates else None,
    )


def _planned(given: str) -> bool:
    """Whether it names a plan: a PLAN file, or settings or a launch command, which make one; a message goes before."""
    if given.endswith(SUFFIX):
        return not _spaced(given) or Path(given).exists()
    return names_settings(given) and not asks_for_memory(_text(given))


def _there(given: str) -> bool:
    """Whether it is a file, a pipe among them; a message is longer than a name can be."""
    try:
        return Path(given).exists()
    except (OSError, ValueError):
        return False


def _read(given: str, text: str) -> Log:
    """The message; settings of another program, which have none, are told from a log."""
    try:
        return read_log(text)
    except BadInput:
        if Path(given).suffix not in SETTINGS or (_spaced(given) and not _there(given)):
            raise
        if is_model(given):
            raise BadInput(f"{given} is a model's config; give it as --model, with the flags of the plan") from None
        raise BadInput(
            f"{given} has no out-of-memory message, and is neither DeepSpeed's JSON, accelerate's YAML nor a PLAN "
            f"file, whose name ends in {SUFFIX}; give what it says as flags (`trainledger check --help`)"
        ) from None


def _text(given: str) -> str:
    """The message, or the text of the file that it names."""
    if not given.strip():
        raise BadInput("MESSAGE is empty; give the text of the error in quotes, or a file that has it")
    path = Path(given)
    if not _there(given):
        if not _spaced(given):
            raise BadInput(f"{given}: there is no such file; check the path, or give the message itself in quotes")
        return given
    try:
        with path.open("rb") as file:
            text = _decoded(file.read(LONGEST_LOG))
    except OSError as error:
        raise BadInput(f"{given} cannot be read ({error.strerror}); give the message itself in quotes") from None
    if not text.strip():
        raise BadInput(f"{given} is empty; give a file that has the message, or the message itself in quotes")
    return text


def _spaced(given: str) -> bool:
    """Whether it has white space, as every message has and few names of files."""
    return any(char.isspace() for char in given)


def _decoded(raw: bytes) -> str:
    """A log as text, whatever else is in it; PowerShell writes what is redirected as UTF-16, with a mark."""
    wide = (raw[:2] == codecs.BOM_UTF16_LE and raw[3:4] == b"\0") or (
        raw[:2] == codecs.BOM_UTF16_BE and raw[2:3] == b"\0"
    )
    return raw.decode("utf-16" if wide else "utf-8", errors="replace")


def _asked(message: OutOfMemory) -> Asked:
    return Asked(
        text=message.text,
        device=message.device,
        index=message.index,
        requested=message.requested[0].text,
        at_least=min(span.at_least for span in message.requested),
        at_most=max(span.at_most for span in message.requested),
        total_bytes=message.total,
        free_bytes=message.free,
        allocated_bytes=message.allocated,
        reserved_bytes=message.reserved,
    )


def _moment(stages: StageMemory, allocated: int | None) -> Moment | None:
    """The place that has nearly as much allocated, at the end of a forward before others of the same."""
    if allocated is None:
        return None
    totals = np.stack([stages.total(index)[0] for index in range(len(stages.places))])
    place, row = np.unravel_index(int(np.abs(totals - allocated).argmin()), totals.shape)
    return _at(stages, int(place), int(row))


def _peak(memory: Memory) -> Moment:
    return Moment(
        place=memory.place,
        pp_stage=memory.pp_stage,
        allocated_bytes=memory.meters["allocated"].estimate,
        alive=memory.alive[:MOST_ALIVE],
    )


def _at(stages: StageMemory, place: int, row: int) -> Moment:
    return Moment(
        place=stages.places[place].label,
        pp_stage=int(stages.pp_stage[0, row]),
        allocated_bytes=int(stages.total(place)[0, row]),
        alive=alive_at(stages, place, row)[:MOST_ALIVE],
    )


def _on_host(message: OutOfMemory, candidates: tuple[Candidate, ...]) -> tuple[Note, ...]:
    """A card was asked for what the plan keeps in host memory."""
    asked = next((one for one in candidates if one.in_plan), None)
    if message.device == "cpu" or asked is None or asked.place != "host":
        return ()
    text = f"the plan keeps {asked.name} in host memory, and the card was asked for it: the offload did not reach the"
    return (Note(rule="offload-not-active", severity="advise", message=f"{text} engine; check its own config"),)


def _said(message: OutOfMemory, run: Run, memory: Memory, device: int) -> list[Note]:
    """What the figures of the message say beside the size."""
    least, most = message.requested[0].at_least, memory.meters["allocated"].estimate
    outside = sum(line.amount for line in memory.beside)
    capacity = message.allowed or message.total or run.usable_bytes
    found: list[tuple[str, str]] = []
    if message.unused is not None and message.unused >= least:
        text = f"{format_bytes(message.unused)} lie unused in PyTorch's allocator, which is as much as was asked for"
        knob = "set expandable_segments:True, which --allocator expandable predicts"
        found.append(("fragmentation", f"{text}: in pieces too small; {knob}"))
    if message.outside is not None and message.outside > outside + OUTSIDE_BYTES:
        text = f"{format_bytes(message.outside)} of the process are outside PyTorch's allocator, where context and"
        found.append(("nccl-memory", f"{text} communicators take {format_bytes(outside)}; use fewer groups"))
    if message.others:
        text = f"{format_bytes(message.others)} of the card belong to other processes"
        found.append(("other-processes", f"{text}; end them, or take another card"))
    if capacity is not None and least > capacity:
        text = f"{message.requested[0].text} are more than the whole card"
        found.append(
            ("more-than-the-card", f"{text}, which has {format_bytes(capacity)}: only a smaller request helps")
        )
    if message.allocated is not None and message.allocated > most * MORE_THAN_PLANNED:
        text = f"{format_bytes(message.allocated)} were allocated, and this plan allocates {format_bytes(most)} at most"
        found.append(("more-than-planned", f"{text}: the run has another batch, precision or recomputation"))
    if capacity is not None and device > capacity:
        text = f"the plan takes {format_bytes(device)} of a card with {format_bytes(capacity)}"
        found.append(("does-not-fit", f"{text}: `ledger` names the smallest change"))
    return [Note(rule=rule, severity="advise", message=text) for rule, text in found]
