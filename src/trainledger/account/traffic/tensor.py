"""Tensor-parallel traffic of one optimizer step: what the regions of a block, its ends and the loss exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from trainledger.account.again import OPS, networks_again, parts_again, reductions_again
from trainledger.account.shares import tensor_elements
from trainledger.account.traffic.collectives import Collective, Op, collective, summed
from trainledger.account.traffic.step import Step
from trainledger.arrays import IntArray
from trainledger.dtypes import bytes_of
from trainledger.facts.model import Block
from trainledger.inventory.tensors import BoolArray, TensorTable


def regions(block: Block, *, joined: bool = True, routed: bool = False) -> int:
    """Column-parallel, row-parallel pairs of a block: one around attention or SSM, one around a dense or shared MLP.

    joined   a parallel block has one of both together
    routed   routed experts are cut like a dense MLP, and share the pair of the shared ones [megatron-tp]
    """
    mixer = int(block.attention is not None or block.ssm is not None)
    both = mixer + int(_has_network(block, routed=routed))
    return min(both, 1) if block.parallel and joined else both


def _has_network(block: Block, *, routed: bool) -> bool:
    moe = block.moe
    return block.mlp is not None or (moe is not None and (routed or moe.shared_intermediate > 0))


def _ends_in_reduction(block: Block, *, routed: bool) -> bool:
    """Whether nothing behind a block's last reduction keeps a tensor for the backward, as a norm there would.

    What a routed network keeps of its end is that of one expert, before the reduction.
    """
    kept = block.keeps_end and block.moe is None
    bare = block.mlp is None and block.moe is None
    return not kept and (bare or _has_network(block, routed=routed))


def tensor_traffic(step: Step) -> Iterator[Collective]:
    """Per region and micro-batch. [megatron-tp, torchtitan-tp]

    without sp   1 all-reduce forward, 1 backward
    with sp      all-gather + reduce-scatter forward; backward the same, and Megatron gathers the saved input again
    Full recompute repeats the forward; where the checkpoint stops early it does not repeat a block's last reduction.
    Selective recompute repeats that of the parts it takes; chosen by operation, the gathers and what it does not keep.
    """
    if not (step.plans.tp > 1).any():
        return
    yield from _hidden(step)
    yield from _loss(step)
    yield from _whole_gradients(step)


def _hidden(step: Step) -> Iterator[Collective]:
    """Hidden states at the regions of blocks, and at the table and the output layer, which OPT-350m has narrower."""
    plans, rules, batches = step.plans, step.rules, step.batches
    sp = (plans.sp == 1)[:, None].astype(np.int64)
    both = partial(regions, joined=rules.joins_parallel)
    part = _by_routing(step, partial(networks_again, step.setting))
    pairs, ops = _by_routing(step, both), OPS in parts_again(step.setting)
    forward = pairs + part + _by_routing(step, both, step.also(ops))
    summed_again = {op: part + _summed_again(step, op) for op in REDUCTIONS}
    backward_gathers = 2 if rules.tp_style == "megatron" else 1
    counts: tuple[tuple[Op, IntArray, IntArray], ...] = (
        ("all_reduce", (2 * pairs + summed_again["all_reduce"]) * (1 - sp), (step.first + step.last) * (1 - sp)),
        ("all_gather", (forward + backward_gathers * pairs) * sp, (step.first + backward_gathers * step.last) * sp),
        ("reduce_scatter", (2 * pairs + summed_again["reduce_scatter"]) * sp, (step.first + step.last) * sp),
    )
    width = next(tensor.shape[1] for tensor in step.model.embedding if tensor.role == "embedding")
    end = bytes_of(step.tokens * width, step.dtype)[:, None]
    for op, inner, ends in counts:
        total = inner * step.hidden_bytes() + ends * end
        yield summed(op, "tp", "hidden", step.dtype, plans.tp, (inner + ends) * batches, total * batches, "megatron-tp")


REDUCTIONS: tuple[Op, ...] = ("all_reduce", "reduce_scatter")


def _summed_again(step: Step, op: Op) -> IntArray:
    """[plans, rows]: sums over ranks, made by `op`, of layers that run again; a checkpoint may stop before the last."""
    layers = step.also(reductions_again(step.setting, op))
    summed_layers = _by_routing(step, partial(regions, joined=step.rules.joins_parallel), layers)
    if step.rules.recompute_reruns_last:
        return summed_layers
    return summed_layers - _by_routing(step, _ends_in_reduction, layers)


def _by_routing(step: Step, count: Callable[..., int], layers: IntArray | None = None) -> IntArray:
    """[plans, rows]: `count(block, routed=...)` summed over some layers [plans, rows, kinds], or a stage's own."""
    chosen = step.blocks if layers is None else layers
    apart = chosen @ _counts(step, count, routed=False)
    if not step.rules.experts_in_region:
        return apart
    return np.where((step.plans.ep == 1)[:, None], chosen @ _counts(step, count, routed=True), apart)


def _counts(step: Step, count: Callable[..., int], *, routed: bool) -> IntArray:
    return np.array([int(count(block, routed=routed)) for block in step.layers], dtype=np.int64)


def _loss(step: Step) -> Iterator[Collective]:
    """Statistics of each token over a cut vocabulary, or all its logits. [megatron-loss]"""
    tp, losses = step.plans.tp, step.losses * step.batches
    if step.rules.gathers_logits:
        logits = bytes_of(step.tokens * step.model.vocab_size, step.dtype)[:, None]
        yield collective("all_gather", "tp", "logits", step.dtype, tp, losses, logits, "torchtitan-tp")
        return
    per_loss = bytes_of(step.tokens, "fp32")[:, None]
    count = step.rules.loss_all_reduces * losses
    yield collective("all_reduce", "tp", "loss statistics", "fp32", tp, count, per_loss, "megatron-loss")


WHOLE_TENSORS = "gradients of whole tensors"


def _whole_gradients(step: Step) -> Iterator[Collective]:
    """Gradients of what every tp rank holds whole and has seen in part only, summed once per step."""
    table, grad = step.own.table, step.setting.dtype("grad")
    sp = (step.plans.sp == 1)[:, None].astype(np.int64)
    whole = table.trainable & (table.tp_dim == -1) & ~table.expert
    if step.rules.reduces_norms:
        elements = step.own.total_few(step.own.few.numel * step.own.few.copies * whole) * sp
        what = "gradients of norms"
    elif step.rules.reduces_partial:
        inside, outside = partial_tensors(table, step.model.layer_prefix)
        each, storages = tensor_elements(step.own, "dim0", 1)
        elements = step.own.total(each * storages * inside) + sp * step.own.total(each * storages * outside)
        what = WHOLE_TENSORS
    else:
        return
    count = (elements > 0).astype(np.int64)
    yield collective(
        "all_reduce", "tp", what, grad, step.plans.tp, count, bytes_of(elements, grad), "megatron-finalize"
    )


def partial_tensors(table: TensorTable, layer_prefix: str) -> tuple[BoolArray, BoolArray]:
    """([T] always, [T] with sp): whole tensors of which a tp rank sees a part of the tokens or features only."""
    whole = table.trainable & (table.tp_dim == -1) & ~table.expert
    inside, shared = _places(table, layer_prefix)
    return whole & inside & ~shared, whole & ~inside


def _places(table: TensorTable, layer_prefix: str) -> tuple[BoolArray, BoolArray]:
    """(inside a region, the whole bias of a matrix that is cut) of each tensor.

    A region is what stands under one name in a block and holds a tensor that is cut.
    """
    before = layer_prefix.partition("{i}")[0]
    keys = [(int(slot), _region(name, before)) for slot, name in zip(table.slots, table.names, strict=True)]
    blocks = (table.slots != table.at.embedding) & (table.slots != table.at.final) & (table.slots != table.at.copy)
    cut = {key for key, dim in zip(keys, table.tp_dim, strict=True) if dim != -1}
    inside = blocks & np.array([key in cut for key in keys])
    weights = {name for name, dim in zip(table.names, table.tp_dim, strict=True) if dim != -1}
    shared = np.array([_weight_of(name) in weights for name in table.names])
    return inside, shared & (table.tp_dim == -1)


def _region(name: str, before: str) -> str:
    """The first part of a name behind the layer's index, or behind that of an MTP depth.

    >>> _region("model.layers.0-3.self_attn.q_proj.weight", "model.layers.")
    'self_attn'
    """
    local = name.removeprefix(before).partition(".")[2]
    return local.partition(".")[0]


def _weight_of(name: str) -> str:
    """The matrix that a bias belongs to; "" of anything else.

    >>> _weight_of("mlp.down_proj.bias"), _weight_of("mlp.experts.down_proj_bias"), _weight_of("mlp.down_proj.weight")
    ('mlp.down_proj.weight', 'mlp.experts.down_proj', '')
    """
    if name.endswith(".bias"):
        return name.removesuffix("bias") + "weight"
    return name.removesuffix("_bias") if name.endswith("_bias") else ""
