"""Context-parallel traffic of one optimizer step: keys and values of each attention layer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainledger.account.traffic.collectives import Collective, summed
from trainledger.account.traffic.step import Step
from trainledger.arrays import IntArray, ceil_div
from trainledger.dtypes import bytes_of


def context_traffic(step: Step) -> Iterator[Collective]:
    """Per attention layer and micro-batch. [ring-attention, ulysses, torchtitan-cp, te-cp]

    ring         k and v travel cp-1 times forward; backward they travel as often and so do their gradients, a hop
                 behind, so in cp messages
    all_to_all   q, k, v and the output are exchanged forward and backward
    all_gather   k and v are gathered forward, their gradients reduce-scattered backward; TransformerEngine gathers
                 again backward

    PyTorch's template differs, see `_template`.
    """
    cp = step.plans.cp
    if not (cp > 1).any():
        return
    if step.rules.rotates_kv:
        yield from _template(step)
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


def _template(step: Step) -> Iterator[Collective]:
    """PyTorch's ring-attention template: k and v travel as one tensor, in the same way forward and backward. [torch-cp]

    ring         cp - 1 hops, each an all-to-all in which everything goes to the neighbour
    all_gather   one gather
    Under both their gradients make cp hops, the last one home, in fp32. A recomputed block repeats its forward whole,
    for the output of attention is saved behind it.
    """
    cp = step.plans.cp
    layers, kv, _ = _attention_bytes(step)
    passes = 2 + step.recompute
    if step.setting.cp_comm == "ring":
        hops = passes * (cp - 1)[:, None]
        yield summed("all_to_all", "cp", "k and v", step.dtype, cp, hops * layers, hops * kv, "torch-cp", hop=True)
    else:
        whole = passes * cp[:, None] * kv
        yield summed("all_gather", "cp", "k and v", step.dtype, cp, passes * layers, whole, "torch-cp")
    hops, grads = cp[:, None], _attention_bytes(step, "fp32")[1]
    yield summed("all_to_all", "cp", "gradients of k, v", "fp32", cp, hops * layers, hops * grads, "torch-cp", hop=True)


def _attention_bytes(step: Step, dtype: str = "") -> tuple[IntArray, IntArray, IntArray]:
    """([plans, rows] attention layers x micro-batches, bytes of k and v in them, bytes of q and output)."""
    tp, width = step.plans.tp, dtype or step.dtype
    layers = np.zeros_like(step.own.pp_stage)
    kv_bytes, qo_bytes = np.zeros_like(layers), np.zeros_like(layers)
    for index, block in enumerate(step.layers):
        if block.attention is None:
            continue
        attention = block.attention
        times = step.blocks[:, :, index] * step.batches
        kv_heads = attention.heads if attention.kind == "mla" else attention.kv_heads
        per_head = attention.qk_head_dim + attention.v_head_dim
        if step.rules.rotates_kv:
            per_head = 2 * max(attention.qk_head_dim, attention.v_head_dim)
        layers = layers + times
        kv_bytes = kv_bytes + times * bytes_of(step.tokens * ceil_div(kv_heads, tp) * per_head, width)[:, None]
        heads = ceil_div(attention.heads, tp)
        qo_bytes = qo_bytes + times * bytes_of(step.tokens * heads * per_head, width)[:, None]
    return layers, kv_bytes, qo_bytes
