"""A cut run against a single process: every gradient whole, the norm of clipping, and replicas to the bit.

Losses are not compared: AdamW divides by the size of a gradient, so gradients four times too large change a loss by
millionths. Its first steps also move every element by a learning rate, in a direction that is rounding's where the
gradient is about zero. At a rate of 1e-4 one element that went the other way, 2e-4 beside a matrix of a norm of 5, has
been seen to move all gradients of the tenth step by 8e-5 of themselves. At 1e-6 several may do so, and a step that is
not taken at all is still fifty times above the tolerance.

A router that chooses between two experts with the same score is a matter of rounding too, and of a token's whole way
through the model. Where a single process sees such a choice, the run is judged on other tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from gathered import full_gradients
from trainledger.facts.model import Model
from trainledger.facts.model_load import load_with_config
from trainledger.facts.workload import Workload
from trainledger.lines import Instant
from trainledger.plans.plan import Scenario, make_plans
from trainledger.plans.ranks import world_size
from trainledger.plans.setting import Setting, make_setting
from trainledger.rules import REFUSALS, RUNTIME, require
from trainledger.rules.runtime import DRY
from trainledger.runtime.launch.fork import run_forked
from trainledger.runtime.model import Decoder
from trainledger.runtime.model.moe import Moe
from trainledger.runtime.observe.tensors import local_part
from trainledger.runtime.program import Program
from trainledger.runtime.spec import RunSpec
from trainledger.runtime.watch import Unwatched
from trainledger.runtime.world import World

TOLERANCE = 1e-5
"""Of fp32: the norm of a difference over the norm of what is right."""
STEPS = 10
CHECKED = (1, STEPS)
"""Steps whose gradients are compared."""
SEQ = 16
RATES = {"adamw": 1e-6, "adamw-fused": 1e-6, "sgd": 0.1, "sgd-momentum": 0.03}
LOUDNESS = 5.0
"""Matrices are so many times larger than they start: attention and routing must matter."""
MARGIN = 1e-5
"""Probabilities of the last expert that is chosen and the first that is not differ by more, in every choice."""
UNUSED = 1
"""The expert that no token chooses where routing is uneven."""
WORLD_S = 600.0
RULES = tuple(rule for rule in (*RUNTIME, *REFUSALS) if rule.id not in DRY)
"""What a plan that is run here must pass."""

Array = np.ndarray[Any, Any]
Gradients = dict[str, Array]

_PLAIN: dict[str, object] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
_LATENT: dict[str, object] = {
    **_PLAIN,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama-3-8b", {**_PLAIN, "head_dim": 8}),
    "qwen": ("qwen2.5-7b", _PLAIN),
    "qwen-tied": ("qwen2.5-1.5b", _PLAIN),
    "mixtral": ("mixtral-8x7b", {**_PLAIN, "num_local_experts": 4}),
    "latent": ("deepseek-v2", _LATENT),
    "latent-full-q": ("deepseek-v2", {**_LATENT, "q_lora_rank": "null"}),
}
"""A preset and the sizes that make it small."""


class Cell(NamedTuple):
    """One thing to prove.

    plan     the columns that are not 1 (sp, zero_stage: 0)
    fields   of RunSpec: schedule, cp_comm, recompute and so on
    layers   of the model
    uneven   no token chooses expert UNUSED
    """

    model: str
    plan: Mapping[str, int]
    fields: Mapping[str, Any] = {}
    layers: int = 2
    uneven: bool = False

    @property
    def name(self) -> str:
        """What a test or a proof calls it."""
        told = [self.model, *(f"{k}{v}" for k, v in self.plan.items()), *(f"{k}-{v}" for k, v in self.fields.items())]
        return " ".join([*told, "uneven"] if self.uneven else told).replace("_", "-")


class Task(NamedTuple):
    """What a rank is asked to train, ten steps long."""

    spec: RunSpec
    uneven: bool


class Worst(NamedTuple):
    """A relative error, and of what."""

    error: float
    where: str


class Seen(NamedTuple):
    """What one rank saw.

    gradients   whole, by step and name
    norms       before clipping, by step
    parts       digest of each part of a weight after the last step; whoever holds the same part has the same key
    margin      by which routers chose, where a single process did
    """

    gradients: dict[int, Gradients]
    norms: list[float]
    parts: dict[tuple[object, ...], str]
    margin: float = math.inf


@cache
def _model(kind: str, layers: int) -> tuple[dict[str, Any], Model]:
    name, sizes = MODELS[kind]
    sizes = {**sizes, "num_hidden_layers": layers}
    return load_with_config(name, overrides={key: str(value) for key, value in sizes.items()})


def setting_of(kind: str, layers: int, fields: Mapping[str, Any]) -> Setting:
    """What the rules are asked about cells of a model with these fields."""
    named: dict[str, Any] = {
        name: fields[name]
        for name in ("precision", "optimizer", "recompute", "schedule", "cp_comm", "pp_layout")
        if name in fields
    }
    scenario = Scenario(engine="pytorch", precision="fp32", recompute="none")
    return make_setting(_model(kind, layers)[1], Workload(seq=SEQ), msgspec.structs.replace(scenario, **named))


def task_of(cell: Cell, optimizer: str) -> Task:
    """The run of a cell; Refused where a rule forbids it."""
    fields: dict[str, Any] = {**cell.fields, "optimizer": optimizer}
    plans = make_plans(cell.plan)
    require(RULES, setting_of(cell.model, cell.layers, fields), plans)
    config, model = _model(cell.model, cell.layers)
    spec = RunSpec(model=model, config=config, plan=plans.row(0), seq=SEQ, steps=STEPS, **fields)
    return Task(msgspec.structs.replace(spec, learning_rate=RATES[optimizer]), cell.uneven)


def alone(task: Task) -> Task:
    """The same training in a single process that knows no parallelism, all sequences of a step at once."""
    plan = task.spec.plan
    spec = msgspec.structs.replace(
        task.spec,
        plan={**dict.fromkeys(plan, 1), "sp": 0, "zero_stage": 0, "mbs": task.spec.sequences_per_step},
        schedule="1f1b",
        recompute="none",
        early_stop=True,
        loss_parallel=True,
        cp_comm="ring",
        pp_layout=(),
    )
    return Task(spec, task.uneven)


class _Loud(Program):
    """The program with values that matter, in every bias and norm too, and with the norms of clipping kept."""

    uneven = False

    def __init__(self, task: Task, world: World, watch: _Gradients) -> None:
        self.uneven = task.uneven
        self.norms: list[float] = []
        self.margin = math.inf
        super().__init__(task.spec, world, watch)

    def _decoder(self, chunk: int) -> Decoder:
        decoder = super()._decoder(chunk)
        with torch.no_grad():
            for name, parameter in decoder.named_parameters():
                if parameter.dim() > 1 and "norm" not in name:
                    parameter.mul_(LOUDNESS)
                else:
                    parameter.add_(torch.linspace(-0.1, 0.1, parameter.shape[-1]))
        for module in decoder.modules():
            if isinstance(module, Moe):
                self._prepare(module)
        return decoder

    def _prepare(self, router: Moe) -> None:
        """Let a router choose as if one expert's probability were below zero, and note how clear its choices are."""
        if self.uneven:
            gate = router.get_submodule(router.rule.gate).get_parameter("weight")
            router.correction = torch.zeros(len(gate)).index_fill(0, torch.tensor(UNUSED), -2.0)
        if self.world.mesh.size() == 1:
            router.register_forward_pre_hook(self._note_margin)

    def _note_margin(self, router: nn.Module, given: tuple[torch.Tensor]) -> None:
        assert isinstance(router, Moe)
        assert router.rule.router == "softmax"
        with torch.no_grad():
            scores = router.get_submodule(router.rule.gate)(given[0]).float().softmax(dim=-1)
            if router.correction is not None:
                scores += router.correction
            best = scores.topk(router.rule.top_k + 1).values
        self.margin = min(self.margin, float((best[..., -2] - best[..., -1]).min()))

    def _clip(self) -> float:
        norm = super()._clip()
        self.norms.append(norm)
        return norm


class _Gradients(Unwatched):
    """Keeps whole gradients before they are clipped."""

    def __init__(self) -> None:
        self.program: Program | None = None
        self.step = 0
        self.found: dict[int, Gradients] = {}

    def instant(self, instant: Instant, named: Iterable[tuple[str, str, torch.Tensor]]) -> None:
        """After the last backward of a checked step."""
        if instant == "backward" and self.step in CHECKED:
            assert self.program is not None
            self.found[self.step] = {name: whole.numpy().copy() for name, whole in full_gradients(self.program).items()}


def trained(rank: int, tasks: Sequence[Task]) -> list[Seen]:
    """What this rank sees of each task; all have as many ranks."""
    del rank
    return [_trained(task) for task in tasks]


def _trained(task: Task) -> Seen:
    watch = _Gradients()
    world = World(task.spec, torch.device("cpu"))
    program = watch.program = _Loud(task, world, watch)
    for index in range(task.spec.steps):
        watch.step = index + 1
        program.step(index)
    return Seen(watch.found, program.norms, dict(_parts(program)), program.margin)


def _parts(program: Program) -> Iterable[tuple[tuple[object, ...], str]]:
    """(key, digest) of what this rank holds of every weight; experts of another ep rank are other experts."""
    for kept in program.parameters:
        where: list[object] = [kept.name]
        if ".*." in kept.name:
            where.append(program.world.place.ep)
        if isinstance(kept.parameter, DTensor):
            mesh = kept.parameter.device_mesh
            axes = enumerate(kept.parameter.placements)
            where += [mesh.get_local_rank(axis) for axis, placed in axes if not placed.is_replicate()]
        own = local_part(kept.parameter.detach()).contiguous()
        yield tuple(where), hashlib.sha256(own.numpy().tobytes()).hexdigest()


_alone: dict[tuple[str, bool], Seen] = {}
"""What single processes saw, which many cells share: by digest of the spec, and whether routing is uneven."""


def references(tasks: Sequence[Task]) -> list[Seen]:
    """What a single process sees of each task; those not seen before run one after another in one process."""
    wanted = {(one.spec.digest, one.uneven): one for one in map(alone, tasks)}
    missing = {key: one for key, one in wanted.items() if key not in _alone}
    if missing:
        (found,) = run_forked(1, trained, list(missing.values()), timeout_s=WORLD_S)
        _alone.update(zip(missing, found, strict=True))
        for (_, uneven), seen in zip(missing, found, strict=True):
            assert not uneven or idle_experts(seen) == {UNUSED}
    return [_alone[one.spec.digest, one.uneven] for one in map(alone, tasks)]


def idle_experts(seen: Seen) -> set[int]:
    """Experts whose whole gradient is zero in every layer and checked step."""
    stacks = [whole for step in CHECKED for name, whole in seen.gradients[step].items() if ".*." in name]
    return {expert for expert in range(len(stacks[0])) if not any(whole[expert].any() for whole in stacks)}


def worlds(tasks: Sequence[Task]) -> list[list[Seen]]:
    """What the ranks of each task see, in ranks that are started once for all of them."""
    (ranks,) = {world_size(task.spec.plan) for task in tasks}
    of_ranks = run_forked(ranks, trained, list(tasks), timeout_s=WORLD_S)
    return [list(of_task) for of_task in zip(*of_ranks, strict=True)]


def compared(ranks: Sequence[Seen], right: Seen) -> Worst:
    """What is furthest off on any rank; an AssertionError where something is not there, or replicas differ."""
    off = [Worst(0.0, "nothing")]
    for rank, seen in enumerate(ranks):
        assert len(seen.norms) == len(right.norms)
        for step, (one, other) in enumerate(zip(seen.norms, right.norms, strict=True), 1):
            off.append(Worst(abs(one / other - 1), f"the norm of step {step} on rank {rank}"))
        for step in CHECKED:
            for name, whole in seen.gradients[step].items():
                where = f"{name} at step {step} on rank {rank}"
                off.append(Worst(_error(whole, right.gradients[step][name]), where))
    for step in CHECKED:
        names = set[str]().union(*(seen.gradients[step] for seen in ranks))
        assert names == right.gradients[step].keys(), names ^ right.gradients[step].keys()
    _replicas(ranks)
    return max(off)


def _error(found: Array, right: Array) -> float:
    """Of a stack of experts that of the worst expert; where nothing is right but zero, zero or infinity."""
    assert found.shape == right.shape
    if right.ndim == 3:
        return max(_error(one, other) for one, other in zip(found, right, strict=True))
    distance, size = float(np.linalg.norm(found - right)), float(np.linalg.norm(right))
    if size == 0.0:
        return 0.0 if distance == 0.0 else float("inf")
    return distance / size


def _replicas(ranks: Sequence[Seen]) -> None:
    """Whoever holds the same part of a weight has the same bits."""
    held: dict[tuple[object, ...], str] = {}
    for seen in ranks:
        for part, digest in seen.parts.items():
            assert held.setdefault(part, digest) == digest, f"replicas differ: {part}"


def tasks_of(cell: Cell) -> list[Task]:
    """Every run of a cell: under SGD, which hides no factor in a gradient, and under AdamW, unless it names another."""
    chosen = cell.fields.get("optimizer")
    return [_clear(task_of(cell, optimizer)) for optimizer in ((chosen,) if chosen else ("sgd", "adamw"))]


def _clear(task: Task) -> Task:
    """The task with the first seed, from its own on, under which no router chooses between equals."""
    while references([task])[0].margin < MARGIN:
        task = task._replace(spec=msgspec.structs.replace(task.spec, seed=task.spec.seed + 1))
    return task


def check(cell: Cell) -> Worst:
    """Prove one cell: its worst relative error, to be held against TOLERANCE."""
    tasks = tasks_of(cell)
    return max(compared(*pair) for pair in zip(worlds(tasks), references(tasks), strict=True))
