"""From a request to what the accounts take: a Setting, the columns of its plan, and what was assumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from trainledger.account.again import parts_again
from trainledger.arrays import ints
from trainledger.errors import BadInput, UsageError
from trainledger.facts.model import routed
from trainledger.facts.model_load import IDLE_NOTE
from trainledger.facts.workload import DEFAULT_SEQ, Workload
from trainledger.inventory.inventory import Inventory
from trainledger.plans.limits import check_countable, check_degrees, check_microbatches, check_workload
from trainledger.plans.plan import Plans, Scenario, data_parallel_degree, make_plans, num_microbatches
from trainledger.plans.setting import Setting, make_setting
from trainledger.profiles import OPTIMIZER_ALIASES, zero_unsaid
from trainledger.rules import REFUSALS, RULES, findings, require
from trainledger.service.models import find_model
from trainledger.service.plan_file import overlay
from trainledger.service.requests import PlanRequest, RunRequest
from trainledger.units import format_bytes, parse_quantity

if TYPE_CHECKING:
    from trainledger.facts.cluster import Accelerator, Cluster
    from trainledger.facts.model import Model

_DEFAULT = Scenario()
_SHOWN: dict[str, str | int] = {
    "engine": _DEFAULT.engine,
    "precision": _DEFAULT.precision,
    "optimizer": _DEFAULT.optimizer,
    "seq": DEFAULT_SEQ,
    "mbs": 1,
    "recompute": _DEFAULT.recompute,
}
"""Defaults that are printed with every answer that used them."""


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader should know: a rule that warns or advises, or how the model or the engine was read."""

    rule: str
    severity: str
    message: str


class Degrees(msgspec.Struct, frozen=True, kw_only=True):
    """A plan's integers and words, as the answers repeat them, with the engine's own where nothing was said.

    recompute_parts    of a block, under selective recomputation; recompute_layers: of a virtual stage, 0 all
    compile, dropout, overlap_comm, loss, allocator, routing, cp_comm   "" where the engine, or the plan, has none
    loss_chunks        0 where the loss is not in chunks
    """

    gpus: int
    tp: int
    sp: bool
    pp: int
    vpp: int
    cp: int
    ep: int
    etp: int
    dp: int
    dp_replicate: int
    dp_shard: int
    mbs: int
    num_microbatches: int
    seq: int
    gbs: int | None
    recompute: str
    schedule: str
    precision: str
    grad_dtype: str
    optimizer: str
    offload: tuple[str, ...]
    attention: str
    engine: str
    framework_version: str
    recompute_parts: tuple[str, ...]
    recompute_layers: int
    compile: str
    dropout: str
    overlap_comm: str
    loss: str
    loss_chunks: int
    allocator: str
    routing: str
    cp_comm: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A resolved request.

    columns   every column of Plans but zero_stage
    assumed   defaults that were applied, by flag
    changed   KEY=VALUE pairs that --set changed in the model's config
    """

    setting: Setting
    columns: dict[str, int]
    gpus: int
    assumed: dict[str, str | int]
    changed: tuple[str, ...] = ()

    @property
    def accelerator(self) -> str | None:
        """The name of the card, where there is one."""
        return self.setting.accelerator.name if self.setting.accelerator is not None else None

    @property
    def cluster(self) -> str | None:
        """The name of the cluster, where there is one."""
        return self.setting.cluster.name if self.setting.cluster is not None else None

    @property
    def usable_bytes(self) -> int | None:
        """Memory of the card that "fits" is judged against; None without a card."""
        return self.setting.usable_bytes

    @property
    def host_share_bytes(self) -> int | None:
        """Host memory of one rank's share of a node; None where it is not known."""
        cluster = self.setting.cluster
        return cluster.host_share_bytes(self.gpus) if cluster is not None else None

    def fits(self, device_bytes: int, host_bytes: int) -> bool | None:
        """Whether card and, where it is known, host hold a plan; None without a card."""
        if self.usable_bytes is None:
            return None
        share = self.host_share_bytes
        return device_bytes <= self.usable_bytes and (share is None or host_bytes <= share)

    @property
    def zero_unsaid(self) -> int:
        """The zero_stage where nobody says one: the engine's default, or its lowest where nothing can be shared."""
        profile, columns = self.setting.profile, self.columns
        if columns["dp_shard"] * columns["cp"] == 1 and not self.setting.scenario.offload:
            return min(profile.zero_stages)
        return zero_unsaid(self.setting.scenario.engine, profile)

    def plans(self, zero_stages: Sequence[int]) -> Plans:
        """One row per zero_stage."""
        return make_plans({**self.columns, "zero_stage": list(zero_stages)})

    def degrees(self) -> Degrees:
        """What the answer repeats of the plan."""
        scenario, workload, columns = self.setting.scenario, self.setting.workload, self.columns
        given = {name: columns[name] for name in columns if name != "sp"}
        return Degrees(
            gpus=self.gpus,
            sp=columns["sp"] == 1,
            dp=columns["dp_replicate"] * columns["dp_shard"],
            seq=workload.seq,
            gbs=workload.gbs,
            recompute=scenario.recompute,
            schedule=scenario.schedule,
            precision=scenario.precision,
            grad_dtype=self.setting.dtype("grad"),
            optimizer=scenario.optimizer,
            offload=scenario.offload,
            attention=scenario.attention,
            engine=scenario.engine,
            framework_version=self.setting.profile.framework_version,
            **given,
            **self._ways(),
        )

    def _ways(self) -> dict[str, Any]:
        """How the run is run, by what was said or else by what the engine does."""
        setting, columns = self.setting, self.columns
        scenario, memory = setting.scenario, setting.profile.memory
        loss = setting.loss_word(cut=columns["tp"] > 1)
        return {
            "recompute_parts": setting.recomputed_parts if scenario.recompute == "selective" else (),
            "recompute_layers": scenario.recompute_layers,
            "dropout": scenario.dropout,
            "overlap_comm": scenario.overlap_comm,
            "compile": ("on" if setting.compiled else "off") if memory.compile else "",
            "loss": loss,
            "loss_chunks": setting.loss_chunks if loss == "chunked" else 0,
            "allocator": setting.allocator(self.gpus) if memory.device else "",
            "routing": (scenario.routing or "balanced") if routed(setting.model) else "",
            "cp_comm": setting.cp_comm if columns["cp"] > 1 else "",
        }


def resolve(request: RunRequest, *, model: Model | None = None) -> Run:
    """Look everything up, derive the data-parallel degrees, and apply the defaults.

    `model` stands in place of the one that the request names. Rules are not asked yet.
    """
    request = overlay(request)
    model = model if model is not None else find_model(request)
    accelerator, cluster = place(request)
    workload = _workload(request)
    setting = make_setting(
        model,
        workload,
        _scenario(request),
        accelerator=accelerator,
        cluster=cluster,
        largest_module_params=request.largest_layer or 0,
        reserve_bytes=_reserve(request),
    )
    columns, gpus = _columns(request, setting)
    check_countable(model, workload, setting.scenario, columns)
    assumed: dict[str, str | int] = {name: v for name, v in _SHOWN.items() if getattr(request, name) is None}
    if request.gpus is None:
        assumed = {"gpus": gpus, **assumed}
    if request.sp is None and columns["sp"]:
        assumed["sp"] = "on"
    return Run(setting=setting, columns=columns, gpus=gpus, assumed=assumed, changed=request.set or ())


def single_plan(request: PlanRequest, *, model: Model | None = None) -> tuple[Run, Plans]:
    """The run and its single plan, of which no rule has been asked; a stage that is unsaid is what the engine takes."""
    run = resolve(request, model=model)
    if request.zero is not None:
        return run, run.plans([request.zero])
    zero = run.zero_unsaid
    return dataclasses.replace(run, assumed={**run.assumed, "zero": zero}), run.plans([zero])


def prepared(request: PlanRequest, *, model: Model | None = None) -> tuple[Run, Plans, Inventory]:
    """The run, its single plan, which every rule that refuses has passed, and its inventory."""
    run, plans = single_plan(overlay(request), model=model)
    require(REFUSALS, run.setting, plans)
    return run, plans, Inventory(run.setting)


def _reserve(request: RunRequest) -> int:
    if request.reserve is None or request.reserve == "0":
        return 0
    try:
        return int(parse_quantity(request.reserve, "byte"))
    except BadInput as error:
        raise BadInput(f"--reserve {error}, such as 4 GiB, or 0") from None


def place(request: RunRequest) -> tuple[Accelerator | None, Cluster | None]:
    """The card and the cluster that a request names."""
    if request.cluster is None and request.gpu is None:
        return None, None
    from trainledger.facts.cluster import find_accelerator, find_cluster

    cluster = find_cluster(request.cluster) if request.cluster is not None else None
    card = find_accelerator(request.gpu) if request.gpu is not None else None
    if cluster is None:
        return card, None
    if card is not None and card.name != cluster.accelerator.name:
        raise UsageError(
            f"--gpu {request.gpu} is {card.name} and --cluster {request.cluster} has {cluster.accelerator.name}; "
            "leave one of them out"
        )
    return cluster.accelerator, cluster


def _workload(request: RunRequest) -> Workload:
    given = {name: getattr(request, name) for name in Workload.__struct_fields__}
    workload = Workload(**{name: value for name, value in given.items() if value is not None}).checked()
    check_workload(workload)
    if request.lora_targets is not None and not workload.lora_rank:
        raise UsageError("--lora-targets without --lora-rank adapts nothing: add --lora-rank, such as 16")
    return workload


def _scenario(request: RunRequest) -> Scenario:
    given = {name: getattr(request, name) for name in Scenario.__struct_fields__}
    given["optimizer"] = OPTIMIZER_ALIASES.get(request.optimizer or "", request.optimizer)
    return Scenario(**{name: value for name, value in given.items() if value is not None})


def _columns(request: RunRequest, setting: Setting) -> tuple[dict[str, int], int]:
    """The columns of the plan and the GPUs they need; dp is what the other degrees leave."""
    axes = ("tp", "pp", "vpp", "cp", "ep", "mbs")
    columns = {name: getattr(request, name) if getattr(request, name) is not None else 1 for name in axes}
    asked = ("etp", "gpus", "dp", "dp_replicate", "dp_shard")
    check_degrees({**columns, **{name: getattr(request, name) for name in asked}})
    model_parallel = columns["tp"] * columns["pp"] * columns["cp"]
    gpus = request.gpus if request.gpus is not None else model_parallel * _dp_asked(request)
    check_degrees({"gpus": gpus})
    dp = data_parallel_degree(gpus, columns["tp"], columns["pp"], columns["cp"])
    replicate, shard = _dp_split(request, dp, f"gpus / (tp x pp x cp) = {gpus} / {model_parallel} = {dp}")
    sp = request.sp if request.sp is not None else columns["tp"] > 1 and "sp" in setting.profile.axes
    columns["sp"] = int(sp)
    columns["etp"] = request.etp or int(setting.profile.default_etp(ints(columns["tp"]), ints(columns["ep"]))[0])
    columns["dp_replicate"], columns["dp_shard"] = replicate, shard
    share = columns["mbs"] * dp
    columns["num_microbatches"] = int(num_microbatches(setting.workload.gbs, ints(share))[0])
    check_microbatches(setting.workload.gbs, share, columns["num_microbatches"])
    return columns, gpus


def _dp_asked(request: RunRequest) -> int:
    if request.dp is not None:
        return request.dp
    return (request.dp_replicate or 1) * (request.dp_shard or 1)


def _dp_split(request: RunRequest, dp: int, derived: str) -> tuple[int, int]:
    """(dp_replicate, dp_shard), whose product is dp; what was given and does not agree is refused."""
    if request.dp is not None and request.dp != dp:
        raise UsageError(f"--dp is {request.dp}, but dp = {derived}; leave --dp out, or change --gpus or a degree")
    replicate, shard = request.dp_replicate, request.dp_shard
    if replicate is None and shard is None:
        return 1, dp
    if replicate is None or shard is None:
        given, name = (shard, "dp-shard") if replicate is None else (replicate, "dp-replicate")
        part = given or 1
        if dp % part:
            raise UsageError(f"--{name} {part} does not divide dp = {derived}; use a divisor of {dp}")
        return (dp // part, part) if replicate is None else (part, dp // part)
    if replicate * shard != dp:
        raise UsageError(
            f"--dp-replicate {replicate} x --dp-shard {shard} = {replicate * shard}, but dp = {derived}; "
            "leave one of them out"
        )
    return replicate, shard


def _states_alone(model: Model) -> tuple[Note, ...]:
    if not model.states_alone:
        return ()
    text = (
        "activations, and buffers as large as the largest layer, cannot be told from a parameter count: totals and "
        "fits are of the states alone"
    )
    if not model.params_only:
        text = (
            f"activations are not counted, for {model.name} has {' and '.join(model.unaccounted)}: totals and fits "
            "are of the states and the engine's buffers alone"
        )
    return (Note(rule="states-alone", severity="warn", message=text),)


def host_notes(run: Run, host_bytes: int) -> tuple[Note, ...]:
    """What is to be said of the host memory that offloading takes, per rank."""
    if not host_bytes:
        return ()
    share = run.host_share_bytes
    if share is None:
        text = f"offloading holds {format_bytes(host_bytes)} of host memory per GPU, and the host's is not known"
        return (Note(rule="host-ram-unknown", severity="warn", message=f"{text}; name a --cluster that states it"),)
    if host_bytes <= share:
        return ()
    text = f"offloading holds {format_bytes(host_bytes)} of host memory per GPU, and a GPU's share of its node is"
    message = f"{text} {format_bytes(share)}; use more nodes, or offload less"
    return (Note(rule="host-memory", severity="warn", message=message),)


def notes(run: Run, plans: Plans | None = None, *, shown: Plans | None = None) -> tuple[Note, ...]:
    """Rules that warn or advise, on the first plan that breaks each, and what model and engine have to say.

    `shown` are the plans that an answer tells of, where no rule is asked of them again.
    """
    setting = run.setting
    milder = [rule for rule in RULES if rule.severity != "refuse" and rule.scope != "check"]
    each = [plans.take(slice(i, i + 1)) for i in range(len(plans))] if plans is not None else []
    found = {f.rule: f for plan in reversed(each) for f in findings(milder, setting, plan)}.values()
    return (
        *_states_alone(setting.model),
        *(Note(rule=f.rule, severity=f.severity, message=f.message) for f in found),
        *(Note(rule="set-by-hand", severity="note", message=f"{pair} in the model's config") for pair in run.changed),
        *_uncounted(setting, plans),
        *_remarks(setting, plans if plans is not None else shown),
        *(Note(rule=_read_rule(setting.model, text), severity="note", message=text) for text in setting.model.notes),
    )


def _uncounted(setting: Setting, plans: Plans | None) -> tuple[Note, ...]:
    """What selective recomputation does again and no line counts."""
    if plans is None or "mla_up_proj" not in parts_again(setting) or not (plans.tp > 1).any():
        return ()
    text = "--recompute-parts mla_up_proj: the latents that its matrices gather again over tp are not counted as sent"
    return (Note(rule="recompute-gathers-uncounted", severity="warn", message=text),)


def _remarks(setting: Setting, plans: Plans | None) -> tuple[Note, ...]:
    """What the engine's profile says of any of these plans; without any, of all plans."""
    none = ints([])
    zero, pp = (plans.zero_stage, plans.pp) if plans is not None else (none, none)
    said = (remark.text for remark in setting.profile.notes if remark.concerns(zero, pp))
    return tuple(Note(rule="engine-profile", severity="note", message=text) for text in said)


def _read_rule(model: Model, text: str) -> str:
    """What a note on how the model was read goes under: of a user's own config the answers show it as text too."""
    if text.startswith(IDLE_NOTE):
        return "set-by-hand"
    return "model-as-read" if model.params_only or model.source.startswith("preset ") else "config-as-read"
