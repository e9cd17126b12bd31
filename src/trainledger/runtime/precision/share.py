"""How much of a run's arithmetic is in FP8: from shapes alone, for one optimizer step of the whole job.

No torch here, so that whoever starts a run can say it before any rank does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec

from trainledger.facts.model import Attention, Block, Model, Tensor
from trainledger.runtime.spec import FP8_RECIPES, RunSpec

BACKWARD = 2
"""Products of a matrix in the backward: the gradients of its input and of itself."""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """FLOP of one optimizer step of all ranks, and how many calls of products they are.

    gemms         products of weight matrices; grouped ones of experts are one
    flop          with attention, which is counted in full, causal or not
    linear_flop   of weight matrices alone, the output layer and routers among them
    """

    gemms: int
    fp8_gemms: int
    flop: int
    fp8_flop: int
    linear_flop: int

    @property
    def of_linear(self) -> float:
        """What part of the arithmetic of weight matrices is in FP8."""
        return self.fp8_flop / self.linear_flop

    @property
    def of_all(self) -> float:
        """What part of all products is in FP8."""
        return self.fp8_flop / self.flop


def fp8_layers(model: Model, layers: Collection[int] | None = None) -> tuple[str, ...]:
    """Modules that an FP8 recipe converts, by their whole name: the matrices of the blocks, in order.

    Not the output layer, not routers, and not routed experts, which are stacked tensors and no layers of their own.
    """
    by_layer = {layer: block for block in model.blocks for layer in block.layers}
    return tuple(
        f"{model.layer_prefix.format(i=layer)}{tensor.name.removesuffix('.weight')}"
        for layer in sorted(by_layer)
        if layers is None or layer in layers
        for tensor in convertible(by_layer[layer])
    )


def convertible(block: Block) -> Iterator[Tensor]:
    """Weights of one layer of a block that become FP8 layers."""
    return (tensor for tensor in block.tensors if tensor.projection and tensor.role != "expert")


def share_of(spec: RunSpec, fallen: Collection[str] = ()) -> Share:
    """What a step of this run computes, and in FP8; `fallen` are layers that have been put back to 16 bits."""
    plan, model = spec.plan, spec.model
    replicas = plan["dp_replicate"] * plan["dp_shard"]
    sequences = spec.sequences_per_step
    calls = replicas * plan["num_microbatches"] * plan["cp"] * plan["tp"]
    tokens = sequences * spec.seq
    again = int(spec.recompute == "full")
    fp8_passes = _fp8_passes(spec.precision) + (again if spec.precision in FP8_RECIPES else 0)
    gemms = fp8_gemms = linear = fp8 = attention = 0
    for block in model.blocks:
        for layer in block.layers:
            prefix = model.layer_prefix.format(i=layer)
            covered = {tensor.name for tensor in convertible(block)}
            for tensor in block.tensors:
                each = 2 * tokens * _visited(tensor, block)
                passes = 1 + again + BACKWARD
                gemms += calls * passes * (each > 0)
                linear += passes * each
                if tensor.name in covered and f"{prefix}{tensor.name.removesuffix('.weight')}" not in fallen:
                    fp8_gemms += calls * fp8_passes
                    fp8 += fp8_passes * each
            if block.attention is not None:
                attention += sequences * _attention_flop(block.attention, spec.seq, again)
    ends = [tensor.numel for tensor in _outside(model)]
    linear += (1 + BACKWARD) * 2 * tokens * sum(ends)
    gemms += (1 + BACKWARD) * calls * len(ends)
    return Share(gemms=gemms, fp8_gemms=fp8_gemms, flop=linear + attention, fp8_flop=fp8, linear_flop=linear)


def _fp8_passes(precision: str) -> int:
    """Products of a converted matrix that are in FP8, of those without recomputation."""
    if precision not in FP8_RECIPES:
        return 0
    return 1 if precision == "fp8-forward" else 1 + BACKWARD


def _visited(tensor: Tensor, block: Block) -> int:
    """Multiply-adds of one token with a weight of a block: of experts those that it visits."""
    if not tensor.linear:
        return 0
    if tensor.role != "expert":
        return tensor.numel * tensor.copies
    assert block.moe is not None
    return tensor.numel * block.moe.top_k


def _outside(model: Model) -> Iterator[Tensor]:
    """Matrices before the first block and after the last; a tied output layer is the table of tokens."""
    if model.tied:
        yield next(tensor for tensor in model.embedding if tensor.role == "embedding")
    yield from (tensor for tensor in (*model.embedding, *model.final) if tensor.linear)


def _attention_flop(attention: Attention, seq: int, again: int) -> int:
    """Two products forward, five backward, since the kernels compute the scores again, of one sequence in full."""
    qk, v = attention.qk_head_dim, attention.v_head_dim
    return 2 * seq * seq * attention.heads * ((1 + again) * (qk + v) + 3 * qk + 2 * v)
