"""Model-parallel traffic of one optimizer step: tensor, context, expert and pipeline parallelism.

X is one hidden tensor of a micro-batch on one rank, (seq / cp) x mbs x hidden elements.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainledger.account.collectives import Collective, collective, summed
from trainledger.account.shares import Shares
from trainledger.arrays import IntArray, ceil_div
from trainledger.dtypes import bytes_of
from trainledger.facts.model import Block
from trainledger.inventory.inventory import Inventory


class _Step:
    """Sizes and counts that every axis shares: arrays [plans] and [plans, rows]."""

    def __init__(self, inventory: Inventory, own: Shares) -> None:
        self.setting = inventory.setting
        self.own = own
        self.plans = own.plans
        self.model = self.setting.model
        self.rules = self.setting.profile.traffic
        self.dtype = self.setting.recipe.activation
        self.tokens = own.plans.tokens(self.setting.workload.seq)
        self.batches = own.plans.num_microbatches[:, None]
        self.recompute = int(self.setting.scenario.recompute == "full")
        self.layers = [block for _, block in inventory.layers]
        self.blocks = own.counts[:, :, [slot for slot, _ in inventory.layers]]
        self.losses = inventory.losses(own.counts)
        at = own.table.at
        self.first = (own.counts[:, :, at.embedding] > 0).astype(np.int64)
        self.last = (own.counts[:, :, at.final] > 0).astype(np.int64)
        self.occupied = (own.counts.sum(axis=2) > 0).astype(np.int64)

    def hidden_bytes(self) -> IntArray:
        """[plans, 1]: bytes of X."""
        return bytes_of(self.tokens * self.model.hidden_size, self.dtype)[:, None]

    def per_block(self, times: list[int]) -> IntArray:
        """[plans, rows]: a per-block count summed over the blocks of a stage."""
        return self.blocks @ np.array(times, dtype=np.int64)


def model_traffic(inventory: Inventory, own: Shares) -> list[Collective]:
    """Every collective of the model-parallel axes."""
    if inventory.setting.model.params_only:
        return []
    step = _Step(inventory, own)
    return [*_tensor(step), *_context(step), *_experts(step), *_pipeline(step), *_shared_weights(step)]


def regions(block: Block) -> int:
    """Column-parallel, row-parallel pairs of a block: one around attention or SSM, one around a dense or shared MLP.

    A parallel block has one of both together. [megatron-tp]
    """
    mixer = int(block.attention is not None or block.ssm is not None)
    shared = block.moe is not None and block.moe.shared_intermediate > 0
    mlp = int(block.mlp is not None or shared)
    return min(mixer + mlp, 1) if block.parallel else mixer + mlp


def _tensor(step: _Step) -> Iterator[Collective]:
    """Per region and micro-batch. [megatron-tp, torchtitan-tp]

    without sp   1 all-reduce forward, 1 backward
    with sp      all-gather + reduce-scatter forward; backward the same, and Megatron gathers the saved input again
    Full recompute repeats the forward; where the checkpoint stops early it does not repeat a block's last reduction.
    """
    plans = step.plans
    tp = plans.tp
    if not (tp > 1).any():
        return
    sp = (plans.sp == 1)[:, None].astype(np.int64)
    size = step.hidden_bytes()
    pairs = step.per_block([regions(block) for block in step.layers])
    ending = step.per_block([int(regions(block) > 0) for block in step.layers])
    skipped = step.recompute * (0 if step.rules.recompute_reruns_last else 1) * ending
    forward = pairs * (1 + step.recompute)
    backward_gathers = 2 if step.rules.tp_style == "megatron" else 1
    ends_reduce = step.first + step.last * (1 - sp)
    all_reduces = (forward - skipped + pairs + ends_reduce) * (1 - sp)
    gathers = (forward + backward_gathers * pairs + step.first + (backward_gathers) * step.last) * sp
    scatters = (forward - skipped + pairs + step.first + step.last) * sp
    batches = step.batches
    yield collective("all_reduce", "tp", "hidden", step.dtype, tp, all_reduces * batches, size, "megatron-tp")
    yield collective("all_gather", "tp", "hidden", step.dtype, tp, gathers * batches, size, "megatron-tp")
    yield collective("reduce_scatter", "tp", "hidden", step.dtype, tp, scatters * batches, size, "megatron-tp")
    losses = step.rules.loss_all_reduces * step.losses * batches
    per_loss = bytes_of(step.tokens, "fp32")[:, None]
    yield collective("all_reduce", "tp", "loss statistics", "fp32", tp, losses, per_loss, "megatron-loss")
    if step.rules.reduces_norms:
        grad = step.setting.dtype("grad")
        whole = step.own.table.trainable & (step.own.table.tp_dim == -1) & ~step.own.table.expert
        elements = step.own.total_few(step.own.few.numel * step.own.few.copies * whole)
        marked = (elements > 0) * sp
        yield collective(
            "all_reduce", "tp", "gradients of norms", grad, tp, marked, bytes_of(elements, grad), "megatron-finalize"
        )


def _context(step: _Step) -> Iterator[Collective]:
    """Per attention layer and micro-batch. [ring-attention, ulysses, torchtitan-cp, te-cp]

    ring         k and v travel cp-1 times forward; backward they travel as often and so do their gradients, a hop
                 behind, so in cp messages
    all_to_all   q, k, v and the output are exchanged forward and backward
    all_gather   k and v are gathered forward, their gradients reduce-scattered backward; TransformerEngine gathers
                 again backward
    """
    cp = step.plans.cp
    if not (cp > 1).any():
        return
    kv_layers, kv_total, qo_total = _attention_bytes(step)
    kind = step.setting.cp_comm
    forward, dtype = 1 + step.recompute, step.dtype
    if kind == "ring":
        hops = (cp - 1)[:, None]
        there, back = hops * kv_layers * forward, cp[:, None] * kv_layers
        for op in ("send", "recv"):
            yield summed(op, "cp", "k and v", dtype, cp, there, hops * forward * kv_total, "ring-attention")
            yield summed(op, "cp", "k, v and gradients", dtype, cp, back, 2 * hops * kv_total, "ring-attention")
    elif kind == "all_to_all":
        calls, passes = 2 * (forward + 1) * kv_layers, forward + 1
        yield summed("all_to_all", "cp", "q and output", dtype, cp, calls, passes * qo_total, "ulysses")
        yield summed("all_to_all", "cp", "k and v", dtype, cp, calls, passes * kv_total, "ulysses")
    else:
        gathers = forward + int(step.rules.regathers_kv)
        whole = cp[:, None] * kv_total
        calls = 2 * kv_layers
        yield summed("all_gather", "cp", "k and v", dtype, cp, gathers * calls, gathers * whole, "torchtitan-cp")
        yield summed("reduce_scatter", "cp", "gradients of k, v", dtype, cp, calls, whole, "torchtitan-cp")


def _attention_bytes(step: _Step) -> tuple[IntArray, IntArray, IntArray]:
    """([plans, rows] attention layers x micro-batches, bytes of k and v in them, bytes of q and output)."""
    tp = step.plans.tp
    layers = np.zeros_like(step.own.pp_stage)
    kv_bytes, qo_bytes = np.zeros_like(layers), np.zeros_like(layers)
    for index, block in enumerate(step.layers):
        if block.attention is None:
            continue
        attention = block.attention
        times = step.blocks[:, :, index] * step.batches
        kv_heads = attention.heads if attention.kind == "mla" else attention.kv_heads
        per_head = attention.qk_head_dim + attention.v_head_dim
        layers = layers + times
        kv_bytes = kv_bytes + times * bytes_of(step.tokens * ceil_div(kv_heads, tp) * per_head, step.dtype)[:, None]
        heads = ceil_div(attention.heads, tp)
        qo_bytes = qo_bytes + times * bytes_of(step.tokens * heads * per_head, step.dtype)[:, None]
    return layers, kv_bytes, qo_bytes


def _experts(step: _Step) -> Iterator[Collective]:
    """Per MoE layer and micro-batch: dispatch and combine, forward and backward, balanced routing. [megatron-moe]"""
    plans = step.plans
    split = plans.sp_ranks
    layers = np.zeros_like(step.own.pp_stage)
    size = np.zeros_like(layers)
    for index, block in enumerate(step.layers):
        if block.moe is not None:
            visits = ceil_div(step.tokens, split) * block.moe.top_k
            times = step.blocks[:, :, index] * step.batches
            layers = layers + times
            size = size + times * bytes_of(visits * step.model.hidden_size, step.dtype)[:, None]
    if not layers.any():
        return
    passes = 2 + step.recompute
    ep, etp = plans.ep, plans.etp
    what, cite = "routed tokens", "megatron-moe"
    yield summed("all_to_all", "ep", what, step.dtype, ep, 2 * passes * layers, 2 * passes * size, cite)
    gathered = passes * size * etp[:, None]
    yield summed("all_gather", "etp", what, step.dtype, etp, passes * layers, gathered, cite)
    yield summed("reduce_scatter", "etp", what, step.dtype, etp, passes * layers, gathered, cite)


def _pipeline(step: _Step) -> Iterator[Collective]:
    """Boundary tensors: each chunk sends its output forward and its input gradient backward. [narayanan: 2.2]

    An inner stage sends m v forward; the last wraps m (v-1) of them to the first; gradients mirror that.
    """
    plans, pp = step.plans, step.plans.pp
    if not (pp > 1).any():
        return
    split = plans.sp_ranks
    size = bytes_of(ceil_div(step.tokens * step.model.hidden_size, split), step.dtype)[:, None]
    chunks, wraps = plans.vpp[:, None] * step.batches, (plans.vpp - 1)[:, None] * step.batches
    inner = step.occupied
    forward = inner * np.where(step.last == 1, wraps, chunks)
    backward = inner * np.where(step.first == 1, wraps, chunks)
    for what, sent, received in (("output", forward, backward), ("input gradient", backward, forward)):
        yield collective("send", "pp", what, step.dtype, pp, sent, size, "megatron-p2p")
        yield collective("recv", "pp", what, step.dtype, pp, received, size, "megatron-p2p")


def _shared_weights(step: _Step) -> Iterator[Collective]:
    """The gradient of an embedding that both ends of the pipeline hold is summed once per step. [megatron-finalize]"""
    table = step.own.table
    copies = table.slots == table.at.copy
    if not copies.any() or not table.trainable[copies].any():
        return
    grad = step.setting.dtype("grad")
    tensor = int(np.nonzero(copies)[0][0])
    elements = step.own.few.numel[:, tensor][step.own.kind][:, None]
    ends = np.where(step.plans.pp > 1, 2, 1)
    count = np.maximum(step.first, step.last)
    yield collective(
        "all_reduce",
        "embedding",
        "embedding gradient",
        grad,
        ends,
        count,
        bytes_of(elements, grad),
        "megatron-finalize",
    )
