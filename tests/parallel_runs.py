"""Training a small decoder for a few steps of SGD, whole or cut: what tests of parallelism compare.

SGD, because AdamW divides by the size of a gradient and so hides a factor in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from strategies import calls_of, setting_of
from trainledger.facts.model import Model
from trainledger.facts.model_load import load_with_config
from trainledger.facts.workload import Workload
from trainledger.runtime.model import Decoder, build_decoder, init_weights
from trainledger.runtime.observe.clock import Clock
from trainledger.runtime.observe.collectives import CollectiveCounter
from trainledger.runtime.observe.dispatch import watching
from trainledger.runtime.observe.observation import Call
from trainledger.runtime.parallelize.recompute import recomputed
from trainledger.runtime.spec import RunSpec
from trainledger.runtime.tensors import plain_name

SEQ = 16
CHECKED = (1, 10)
"""Steps whose gradients are compared; the last is the end of a run."""
RATE = 0.1
ROUNDING = 1e-2
"""Of the largest gradient: what is smaller is compared with this much of it, 1e-5 of which fp32 cannot resolve."""

Gradients = dict[str, np.ndarray[Any, Any]]
Batch = tuple[torch.Tensor, torch.Tensor]

GROUPED: dict[str, object] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 67,
}
ROUTED: dict[str, object] = {**GROUPED, "num_local_experts": 8}
LATENT: dict[str, object] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "vocab_size": 67,
}
MODELS = {"grouped": ("llama-3-8b", GROUPED), "routed": ("mixtral-8x7b", ROUTED), "latent": ("deepseek-v2", LATENT)}


def spec_of(kind: str, plan: Mapping[str, int], **fields: object) -> RunSpec:
    """A RunSpec of a small model, with the columns of a plan that are not 1."""
    name, sizes = MODELS[kind]
    config, model = load_with_config(name, overrides={key: str(value) for key, value in sizes.items()})
    return run_spec(config, model, plan, **fields)


def run_spec(config: dict[str, Any], model: Model, plan: Mapping[str, int], **fields: object) -> RunSpec:
    """A RunSpec of any model, with the columns of a plan that are not 1."""
    alone = dict.fromkeys(("tp", "pp", "vpp", "cp", "ep", "etp", "dp_replicate", "dp_shard", "mbs"), 1)
    columns = {**alone, "num_microbatches": 1, "sp": 0, "zero_stage": 0, **plan}
    return RunSpec(model=model, config=config, plan=columns, seq=SEQ, **fields)  # type: ignore[arg-type]


def fresh(spec: RunSpec, change: Callable[[Decoder], None] | None = None) -> Decoder:
    """The whole decoder, its matrices large enough that attention and routing matter."""
    decoder = build_decoder(spec.model, spec.config)
    init_weights(decoder, spec.seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.dim() > 1 and "norm" not in name:
                parameter.mul_(5)
    if change is not None:
        change(decoder)
    return decoder


def wrapped(decoder: Decoder, spec: RunSpec) -> Decoder:
    """The decoder with its blocks recomputed, where the spec says so."""
    for layer, path in decoder.block_paths.items():
        decoder.set_submodule(path, recomputed(decoder.blocks[str(layer)], spec))
    return decoder


def batch_of(spec: RunSpec, step: int, sequences: int) -> Batch:
    """(tokens, labels) [sequences, seq]."""
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randint(0, spec.model.vocab_size, (sequences, spec.seq + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def trained(
    decoder: Decoder,
    batch: Callable[[int], Batch],
    average: Callable[[Decoder], None] = lambda _: None,
    positions: torch.Tensor | None = None,
) -> dict[int, Gradients]:
    """Gradients of the checked steps, by step and name."""
    found: dict[int, Gradients] = {}
    for step in range(1, CHECKED[-1] + 1):
        _backward(decoder, batch(step), positions)
        average(decoder)
        if step in CHECKED:
            found[step] = gradients(decoder)
        with torch.no_grad():
            for parameter in decoder.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=RATE)
                parameter.grad = None
    return found


def gradients(decoder: Decoder) -> Gradients:
    """A copy of every gradient, by the name of its parameter."""
    return {
        plain_name(name): parameter.grad.numpy().copy()
        for name, parameter in decoder.named_parameters()
        if parameter.grad is not None
    }


def differences(found: Gradients, whole: Gradients) -> dict[str, float]:
    """The largest deviation of each tensor from the whole run's, relative to its own largest element.

    A gradient far below all others is a zero with rounding errors in it, such as that of a bias of keys.
    """
    assert found.keys() == whole.keys()
    out: dict[str, float] = {}
    least = ROUNDING * max(float(np.abs(right).max()) for right in whole.values())
    for name, right in whole.items():
        assert found[name].shape == right.shape, name
        out[name] = float(np.abs(found[name] - right).max()) / max(float(np.abs(right).max()), least)
    return out


def worst(found: Mapping[int, Gradients], whole: Mapping[int, Gradients]) -> tuple[float, int, str]:
    """(relative deviation, step, name) of the tensor that is furthest off."""
    every = [(d, step, name) for step in CHECKED for name, d in differences(found[step], whole[step]).items()]
    return max(every)


def routed(name: str) -> bool:
    """Whether a parameter belongs to routed experts."""
    return ".experts." in name


def joined(parts: Sequence[Gradients]) -> Gradients:
    """Whole gradients from those of ranks that each own some experts: those are put one after another."""
    return {
        name: np.concatenate([part[name] for part in parts]) if routed(name) else first
        for name, first in parts[0].items()
    }


def observed(
    decoder: Decoder,
    spec: RunSpec,
    names: Mapping[str, str],
    batch: Callable[[int], Batch],
    positions: torch.Tensor | None = None,
) -> list[Call]:
    """The collectives of forward and backward of one step's micro-batches, `batch` by index."""
    counter = CollectiveCounter(names, Clock())
    with watching(counter):
        for index in range(spec.plan["num_microbatches"]):
            _backward(decoder, batch(index), positions)
    return list(counter.calls())


def _backward(decoder: Decoder, batch: Batch, positions: torch.Tensor | None) -> None:
    tokens, labels = batch
    logits = decoder(tokens, positions)
    functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()).backward()


def predicted(spec: RunSpec, group: str) -> list[Call]:
    """The ledger's collectives on one group, in the order and words of an observation."""
    setting = setting_of(
        spec.model,
        Workload(seq=spec.seq),
        engine="pytorch",
        precision=spec.precision,
        recompute=spec.recompute,
        cp_comm=spec.cp_comm,
    )
    sums: dict[tuple[str, str, int], tuple[int, int, int]] = {}
    for call in calls_of(setting, **spec.plan):
        if call.group == group:
            key = call.op, call.dtype, call.ranks
            count, in_bytes, out_bytes = sums.get(key, (0, 0, 0))
            sums[key] = count + call.count, in_bytes + call.in_bytes, out_bytes + call.out_bytes
    return [
        Call(op=op, group=group, dtype=dtype, ranks=ranks, count=count, in_bytes=in_bytes, out_bytes=out_bytes)
        for (op, dtype, ranks), (count, in_bytes, out_bytes) in sorted(sums.items())
    ]
