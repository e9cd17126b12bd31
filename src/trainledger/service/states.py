"""`states`: weights, gradients, optimizer state and activations of one GPU under every zero_stage, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated

import msgspec
import numpy as np

from trainledger.account.memory import device_bytes, stage_memory
from trainledger.account.peak import by_basis, host_holds, peak_of
from trainledger.account.traffic import wire_totals
from trainledger.arrays import first_that
from trainledger.errors import MissingFact, Refused
from trainledger.facts.model import Model
from trainledger.inventory.inventory import Inventory
from trainledger.lines import BASES, Basis
from trainledger.plans.plan import DEGREE_LIMIT, Plans, Scenario, make_plans, num_microbatches
from trainledger.plans.setting import Setting, make_setting
from trainledger.rules import REFUSALS, passing, require
from trainledger.service.common import Degrees, Note, Run, host_notes, notes, resolve
from trainledger.service.requests import PLACE, RunRequest, flag

MOST_DP = 8192
"""Data-parallel degrees that `fewest_gpus` tries."""

STATES = ("weights", "gradients", "optimizer")


class Request(RunRequest, frozen=True, kw_only=True, rename="kebab"):
    """The training states of one GPU under every ZeRO stage of the engine."""

    single_card: Annotated[
        bool | None, flag("Name the cards on which the whole run fits [on for one GPU without a card].", group=PLACE)
    ] = None


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One zero_stage, per GPU of the pipeline stage that holds most.

    Each state at its own largest instant; total_bytes is the largest instant, so it may be below their sum.
    share_of_full   weights, gradients and optimizer state over those of one unsharded copy
    wire_bytes      what data parallelism sends per optimizer step and rank of the pipeline stage that sends most, which
                    need not be pp_stage; other axes are not in it (`ledger` has them)
    traffic_vs_ddp  wire_bytes over that of zero_stage 0
    refused         the rule that this zero_stage breaks; every figure is then null
    """

    zero_stage: int
    weights_bytes: int | None
    gradients_bytes: int | None
    optimizer_bytes: int | None
    activations_bytes: int | None
    buffers_bytes: int | None
    total_bytes: int | None
    host_bytes: int | None
    share_of_full: float | None
    wire_bytes: int | None
    traffic_vs_ddp: float | None
    fits: bool | None
    pp_stage: int | None
    instant: str | None
    basis: str | None
    refused: str | None = None


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """A card on which the whole run fits, and what it leaves free."""

    name: str
    usable_bytes: int
    free_bytes: int


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The rows, and what they were computed for.

    wire_bytes    of a row, data-parallel traffic alone, per step and rank of the pipeline stage that sends most
    fewest_gpus   by zero_stage, the smallest number of GPUs that fits, card and host; null where none up to dp 8192
                  does; null without a card
    single_cards  cards on which the run fits without sharding; null unless asked
    """

    model: str
    gpus: int
    rows: tuple[Row, ...]
    total_params: int
    active_params: int
    engine: str
    precision: str
    optimizer: str
    seq: int
    mbs: int
    plan: Degrees
    meter: str
    accelerator: str | None
    cluster: str | None
    usable_bytes: int | None
    fewest_gpus: dict[str, int | None] | None
    single_cards: tuple[Card, ...] | None
    assumed: dict[str, str | int]
    notes: tuple[Note, ...]

    @property
    def exit_code(self) -> int:
        """3 when there is a card and no zero_stage fits it."""
        return 3 if self.usable_bytes is not None and not any(row.fits for row in self.rows) else 0


def run(request: Request, *, model: Model | None = None) -> Response:
    """The states of every zero_stage of the engine; `model` in place of the one that the request names."""
    run = resolve(request, model=model)
    setting = run.setting
    stages = setting.profile.zero_stages
    refused = _refusals(run, stages)
    allowed = [stage for stage in stages if stage not in refused]
    inventory = Inventory(setting)
    plans = run.plans(allowed)
    found = dict(zip(allowed, _rows(run, inventory, plans), strict=True))
    on_host = max(row.host_bytes or 0 for row in found.values())
    usable = run.usable_bytes
    return Response(
        model=setting.model.name,
        gpus=run.gpus,
        rows=tuple(found[stage] if stage in found else _refused(stage, refused[stage]) for stage in stages),
        total_params=setting.model.total_params,
        active_params=setting.model.active_params,
        engine=setting.profile.name,
        precision=setting.scenario.precision,
        optimizer=setting.scenario.optimizer,
        seq=setting.workload.seq,
        mbs=run.columns["mbs"],
        plan=run.degrees(),
        meter="allocated",
        accelerator=run.accelerator,
        cluster=run.cluster,
        usable_bytes=usable,
        fewest_gpus=_fewest_gpus(run, inventory, usable) if usable is not None else None,
        single_cards=_single_cards(run, request),
        assumed=run.assumed,
        notes=(*host_notes(run, on_host), *notes(run, plans)),
    )


def _refusals(run: Run, stages: tuple[int, ...]) -> dict[int, str]:
    """What forbids each zero_stage; where one rule forbids them all, it is raised."""
    refused: dict[int, Refused] = {}
    for stage in stages:
        try:
            require(REFUSALS, run.setting, run.plans([stage]))
        except Refused as refusal:
            refused[stage] = refusal
    if len(refused) == len(stages):
        raise next(iter(refused.values()))
    return {stage: str(refusal) for stage, refusal in refused.items()}


def _refused(stage: int, reason: str) -> Row:
    blank = dict.fromkeys(Row.__struct_fields__[1:-1])
    return Row(zero_stage=stage, **blank, refused=reason)  # pyright: ignore[reportArgumentType]


def _rows(run: Run, inventory: Inventory, plans: Plans) -> list[Row]:
    memory = stage_memory(inventory, plans)
    wire = wire_totals(inventory, plans)[1].max(axis=1)
    whole = _full(run, plans)
    ddp = _ddp_wire(run)
    rows: list[Row] = []
    for index, stage in enumerate(plans.zero_stage.tolist()):
        peak = peak_of(memory, index)
        held = sum(peak.by_category[state] for state in STATES)
        rows.append(
            Row(
                zero_stage=stage,
                weights_bytes=peak.by_category["weights"],
                gradients_bytes=peak.by_category["gradients"],
                optimizer_bytes=peak.by_category["optimizer"],
                activations_bytes=None if run.setting.model.states_alone else peak.activations_bytes,
                buffers_bytes=peak.by_category["buffers"],
                total_bytes=peak.total_bytes,
                host_bytes=peak.host_bytes,
                share_of_full=held / whole[index] if whole[index] else None,
                wire_bytes=round(float(wire[index])),
                traffic_vs_ddp=float(wire[index]) / ddp if ddp else None,
                fits=run.fits(_device(run, inventory, plans, index), peak.host_bytes),
                pp_stage=peak.pp_stage,
                instant=peak.instant,
                basis=_basis(by_basis(inventory, plans.take(slice(index, index + 1)), peak)),
            )
        )
    return rows


def _basis(held: Iterable[Basis]) -> str:
    """The weakest basis of what the total holds."""
    return max(held, key=BASES.index, default=BASES[0])


def _full(run: Run, plans: Plans) -> list[int]:
    """States of one unsharded copy, nothing on the host, for each row: at zero_stage 0, or on one rank without it."""
    whole = {**run.columns, "dp_replicate": 1, "dp_shard": 1}
    zero = 0 in run.setting.profile.zero_stages
    alone = make_plans({**whole, "zero_stage": 0 if zero else plans.zero_stage.tolist()})
    memory = stage_memory(Inventory(run.setting.under(offload=())), alone)
    sums = [sum(peak_of(memory, index).by_category[state] for state in STATES) for index in range(len(alone))]
    return sums * len(plans) if zero else sums


def _ddp_wire(run: Run) -> float:
    """Data-parallel bytes of a step without sharding, in this engine or, where it has no zero_stage 0, the paper's."""
    setting = run.setting
    if 0 not in setting.profile.zero_stages:
        recipe = setting.scenario.precision
        plain = Scenario(precision=recipe, optimizer=setting.scenario.optimizer)
        setting = make_setting(setting.model, setting.workload, plain)
        if setting.precision is None:
            return 0.0
    dp = run.columns["dp_replicate"] * run.columns["dp_shard"]
    plans = make_plans({**run.columns, "dp_replicate": 1, "dp_shard": dp, "zero_stage": 0})
    return float(wire_totals(Inventory(setting), plans)[1].max())


def _fewest_gpus(run: Run, inventory: Inventory, usable: int) -> dict[str, int | None]:
    """By zero_stage, the smallest number of GPUs that fits, found in one call over all data-parallel degrees."""
    columns, stages = run.columns, run.setting.profile.zero_stages
    group = columns["tp"] * columns["pp"] * columns["cp"] * columns["dp_replicate"]
    most = max(min(MOST_DP // columns["dp_replicate"], DEGREE_LIMIT // group), 1)
    shard = np.arange(1, most + 1)
    batches = num_microbatches(run.setting.workload.gbs, columns["mbs"] * columns["dp_replicate"] * shard)
    varied = {"dp_shard": np.tile(shard, len(stages)), "num_microbatches": np.tile(batches, len(stages))}
    plans = make_plans({**columns, **varied, "zero_stage": np.repeat(stages, most)})
    rows = np.nonzero(passing(REFUSALS, run.setting, plans))[0]
    fewest: dict[str, int | None] = dict.fromkeys(map(str, stages))
    if len(rows) == 0:
        return fewest
    chosen = plans.take(rows)
    memory = stage_memory(inventory, chosen)
    fits = (memory.device <= usable) & host_holds(run.setting, chosen, memory)
    for stage in stages:
        rows = np.nonzero(fits & (chosen.zero_stage == stage))[0]
        fewest[str(stage)] = _first(inventory, chosen.take(rows[np.argsort(chosen.gpus[rows], kind="stable")]), usable)
    return fewest


def _first(inventory: Inventory, plans: Plans, usable: int) -> int | None:
    """GPUs of the first of some plans that fits with what the allocator reserves too.

    More ranks hold less each, and few more are wanted than without that.
    """

    def fits(row: int) -> bool:
        return device_bytes(inventory, _one(plans, row), usable=usable) <= usable

    found = first_that(fits, len(plans))
    return int(plans.gpus[found]) if found < len(plans) else None


def _one(plans: Plans, row: int) -> Plans:
    return plans.take(slice(row, row + 1))


def _device(run: Run, inventory: Inventory, plans: Plans, index: int) -> int:
    """What the device meter shows of a plan; nobody asks without a card."""
    return device_bytes(inventory, _one(plans, index)) if run.usable_bytes is not None else 0


def _single_cards(run: Run, request: Request) -> tuple[Card, ...] | None:
    """Cards that hold the whole run unsharded, the smallest first; cards of unknown usable memory are left out."""
    asked = request.single_card
    if asked is None:
        asked = run.gpus == 1 and run.setting.accelerator is None
    if not asked:
        return None
    from trainledger.facts.cluster import accelerator_names, find_accelerator

    zero = min(run.setting.profile.zero_stages)
    one = dict.fromkeys(run.columns, 1) | {"sp": 0, "mbs": run.columns["mbs"]}
    plans = make_plans({**one, "zero_stage": zero})
    cards: list[Card] = []
    for name in accelerator_names():
        card = find_accelerator(name)
        setting: Setting = dataclasses.replace(run.setting, accelerator=card, cluster=None)
        try:
            require(REFUSALS, setting, plans)
            usable = card.usable_bytes
        except (Refused, MissingFact):
            continue
        total = device_bytes(Inventory(setting), plans)
        if total <= usable:
            cards.append(Card(name=card.name, usable_bytes=usable, free_bytes=usable - total))
    return tuple(sorted(cards, key=lambda card: (card.usable_bytes, card.name)))
