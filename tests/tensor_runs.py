"""Training a small decoder by SGD, whole or cut over tensor-parallel ranks: what tests of tensor parallelism compare.

SGD, because AdamW divides by the size of a gradient and so hides a factor in it.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch.distributed.tensor import DTensor

import parallel_runs
from model_cases import CASES, facts
from parallel_runs import CHECKED, RATE, Gradients, batch_of, run_spec
from strategies import calls_of, setting_of
from trainledger.facts.model import Model
from trainledger.facts.model_load import load_with_config
from trainledger.facts.workload import Workload
from trainledger.plans.split import layers_of, layers_per_chunk
from trainledger.runtime.model import Decoder, build_decoder, init_weights
from trainledger.runtime.observe.clock import Clock
from trainledger.runtime.observe.collectives import CollectiveCounter
from trainledger.runtime.observe.dispatch import watching
from trainledger.runtime.observe.observation import Call
from trainledger.runtime.observe.tensors import local_part
from trainledger.runtime.parallelize.data import DataParallel
from trainledger.runtime.parallelize.loss import loss_of
from trainledger.runtime.parallelize.recompute import recomputed
from trainledger.runtime.parallelize.tensor import parallelize_tensor, reduce_partial_gradients
from trainledger.runtime.spec import RunSpec
from trainledger.runtime.tensors import kept_parameters
from trainledger.runtime.watch import Unwatched
from trainledger.runtime.world import World

GROUPED = {**parallel_runs.GROUPED, "vocab_size": 64}
LATENT = {**parallel_runs.LATENT, "num_hidden_layers": 3, "vocab_size": 64}
"""Sizes that tensor parallelism cuts evenly."""
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "untied": ("llama-3-8b", GROUPED),
    "tied": ("llama-3-8b", {**GROUPED, "tie_word_embeddings": "true"}),
    "biased": ("llama-3-8b", {**GROUPED, "attention_bias": "true", "mlp_bias": "true"}),
    "qkv-bias": ("qwen2.5-7b", {key: value for key, value in GROUPED.items() if key != "head_dim"}),
    "qk-norm": ("qwen3-8b", GROUPED),
    "routed": ("mixtral-8x7b", {**GROUPED, "num_local_experts": 8}),
    "latent": ("deepseek-v2", LATENT),
    "latent-full-q": ("deepseek-v2", {**LATENT, "q_lora_rank": "null"}),
}


def spec_of(kind: str, plan: Mapping[str, int], **fields: object) -> RunSpec:
    """A RunSpec of a small model, with the columns of a plan that are not 1."""
    name, sizes = MODELS[kind]
    config, model = load_with_config(name, overrides={key: str(value) for key, value in sizes.items()})
    return _spec(model, config, plan, **fields)


def spec_of_case(case: str, plan: Mapping[str, int], **fields: object) -> RunSpec:
    """The same of a case of every family."""
    return _spec(facts(case), CASES[case], plan, **fields)


def _spec(model: Model, config: dict[str, Any], plan: Mapping[str, int], **fields: object) -> RunSpec:
    return msgspec.structs.replace(run_spec(config, model, {**plan, "etp": plan.get("tp", 1)}), **fields)


def fresh(spec: RunSpec) -> Decoder:
    """The same decoder as for other tests, its norms and biases unlike each other as well."""
    decoder = parallel_runs.fresh(spec)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.dim() == 1 or "norm" in name:
                parameter.add_(torch.linspace(-0.1, 0.1, parameter.shape[-1]))
    return decoder


def trained_whole(spec: RunSpec, checked: Sequence[int] = CHECKED) -> dict[int, Gradients]:
    """Gradients of the checked steps of a single process."""
    decoder = fresh(spec)
    optimizer = torch.optim.SGD(decoder.parameters(), lr=RATE)
    found: dict[int, Gradients] = {}
    for step in range(1, checked[-1] + 1):
        tokens, labels = batch_of(spec, step, spec.sequences_per_step)
        parts = len(tokens) // spec.plan["mbs"]
        for part, own in zip(tokens.chunk(parts), labels.chunk(parts), strict=True):
            (loss_of(decoder(part), own, spec, None) / parts).backward()
        if step in checked:
            found[step] = {name: _array(p.grad) for name, p in decoder.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return found


def _array(gradient: torch.Tensor | None) -> np.ndarray[Any, Any]:
    assert gradient is not None
    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return whole.numpy().copy()


class Run:
    """One rank of a decoder that is cut over tp and over data-parallel ranks, as the program puts it together."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.world = World(spec, torch.device("cpu"))
        self.mesh = self.world.mesh["tp"]
        self.decoder = self._cut(fresh(spec))
        self.data = DataParallel(spec, self.world, Unwatched())
        self.data.wrap(self.decoder)
        self.parameters = kept_parameters(self.decoder)
        self.optimizer = torch.optim.SGD((kept.parameter for kept in self.parameters), lr=RATE)

    def _cut(self, decoder: Decoder) -> Decoder:
        parallelize_tensor(decoder, self.mesh, self.spec)
        for layer, path in decoder.block_paths.items():
            decoder.set_submodule(path, recomputed(decoder.blocks[str(layer)], self.spec))
        return decoder

    def backward(self, step: int) -> None:
        """The gradients of one step."""
        plan, place = self.spec.plan, self.world.place
        tokens, labels = batch_of(self.spec, step, self.spec.sequences_per_step)
        own = plan["mbs"] * plan["num_microbatches"]
        replica = place.dp_replicate * plan["dp_shard"] + place.dp_shard
        rows = slice(replica * own, (replica + 1) * own)
        batches = list(zip(tokens[rows].split(plan["mbs"]), labels[rows].split(plan["mbs"]), strict=True))
        for index, (part, wanted) in enumerate(batches):
            self.data.before_micro_batch(last=index == len(batches) - 1)
            loss = loss_of(self.decoder(part), wanted, self.spec, self.mesh)
            (loss / len(batches)).backward()
        reduce_partial_gradients(self.decoder)

    def gradients(self) -> Gradients:
        """Whole gradients by name; each must lie as its parameter does, and be the same on all ranks that hold it."""
        found: Gradients = {}
        for kept in self.parameters:
            parameter, gradient = kept.parameter, kept.parameter.grad
            assert isinstance(parameter, DTensor), kept.name
            assert isinstance(gradient, DTensor), kept.name
            assert gradient.placements == parameter.placements, kept.name
            assert local_part(gradient).shape == local_part(parameter).shape, kept.name
            found[kept.name] = _array(gradient)
        return found

    def finish(self) -> None:
        """The optimizer's part of a step."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.data.after_step()


def trained(rank: int, specs: Sequence[RunSpec], checked: Sequence[int] = CHECKED) -> list[dict[int, Gradients]]:
    """Gradients of the checked steps on one rank, of each spec."""
    del rank
    return [_trained(Run(spec), checked) for spec in specs]


def _trained(run: Run, checked: Sequence[int]) -> dict[int, Gradients]:
    found: dict[int, Gradients] = {}
    for step in range(1, checked[-1] + 1):
        run.backward(step)
        if step in checked:
            found[step] = run.gradients()
        run.finish()
    return found


def worst(
    ranks: Sequence[Mapping[int, Gradients]], whole: Mapping[int, Gradients], *, least: float = 0.0
) -> tuple[float, int, str]:
    """(relative deviation, step, name) of the tensor that is furthest off, on any rank.

    least  a gradient smaller than this part of the largest counts as that large: some are zero but for rounding
    """
    every: list[tuple[float, int, str]] = []
    for found in ranks:
        for step, right in whole.items():
            assert found[step].keys() == right.keys()
            floor = least * max(np.abs(expected).max() for expected in right.values())
            for name, expected in right.items():
                deviation = np.abs(found[step][name] - expected).max() / max(np.abs(expected).max(), floor)
                every.append((float(deviation), step, name))
    return max(every)


def observed(rank: int, specs: Sequence[RunSpec], stages: int = 1) -> list[list[tuple[Call, ...]]]:
    """The collectives over tp in one step of each spec, stage by stage; each stage runs on its own.

    A warning is an error, as it is in the process of the tests: FSDP2 warns of units whose output is a view.
    """
    del rank
    warnings.simplefilter("error")
    return [[_observed(spec, stage, stages) for stage in range(stages)] for spec in specs]


def _observed(spec: RunSpec, stage: int, stages: int) -> tuple[Call, ...]:
    world = World(spec, torch.device("cpu"))
    decoder = _stage(spec, world, stage, stages)
    data = DataParallel(spec, world, Unwatched())
    data.wrap(decoder)
    counter = CollectiveCounter(world.names, Clock())
    with watching(counter):
        batches = spec.plan["num_microbatches"]
        for index in range(batches):
            data.before_micro_batch(last=index == batches - 1)
            tokens, labels = batch_of(spec, index, spec.plan["mbs"])
            given = tokens if stage == 0 else _hidden(spec)
            out = decoder(given, torch.arange(spec.seq))
            if stage == stages - 1:
                loss_of(out, labels, spec, world.mesh["tp"]).backward()
            else:
                out.backward(torch.ones_like(out))
        reduce_partial_gradients(decoder)
    return tuple(call for call in counter.calls() if call.group == "tp")


def _stage(spec: RunSpec, world: World, stage: int, stages: int) -> Decoder:
    per_stage = layers_per_chunk(spec.model.num_layers, stages, "front")
    decoder = build_decoder(
        spec.model,
        spec.config,
        layers=layers_of(stage, per_stage),
        first=stage == 0,
        last=stage == stages - 1,
    )
    init_weights(decoder, spec.seed)
    parallelize_tensor(decoder, world.mesh["tp"], spec)
    for layer, path in decoder.block_paths.items():
        decoder.set_submodule(path, recomputed(decoder.blocks[str(layer)], spec))
    return decoder


def _hidden(spec: RunSpec) -> torch.Tensor:
    """Hidden states as a stage before this one would hand them on."""
    tokens = spec.seq // spec.plan["tp"] if spec.plan["sp"] else spec.seq
    dtype = torch.bfloat16 if spec.precision == "bf16" else torch.float32
    return torch.ones(spec.plan["mbs"], tokens, spec.model.hidden_size, dtype=dtype, requires_grad=True)


def predicted(spec: RunSpec, stage: int = 0, stages: int = 1) -> tuple[Call, ...]:
    """The ledger's collectives over tp on one stage, in the order and words of an observation."""
    setting = setting_of(
        spec.model, Workload(seq=spec.seq), engine="pytorch", precision=spec.precision, recompute=spec.recompute
    )
    traffic = msgspec.structs.replace(
        setting.profile.traffic,
        recompute_reruns_last=not spec.early_stop,
        gathers_logits=not spec.loss_parallel,
    )
    setting = dataclasses.replace(setting, profile=msgspec.structs.replace(setting.profile, traffic=traffic))
    sums: dict[tuple[str, str, int], tuple[int, int, int]] = {}
    for call in calls_of(setting, stage, **{**spec.plan, "pp": stages}):
        if call.group == "tp":
            key = call.op, call.dtype, call.ranks
            count, in_bytes, out_bytes = sums.get(key, (0, 0, 0))
            sums[key] = count + call.count, in_bytes + call.in_bytes, out_bytes + call.out_bytes
    return tuple(
        Call(op=op, group="tp", dtype=dtype, ranks=ranks, count=count, in_bytes=in_bytes, out_bytes=out_bytes)
        for (op, dtype, ranks), (count, in_bytes, out_bytes) in sorted(sums.items())
    )
