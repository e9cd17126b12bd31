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


def _attention_bytes(step: Step) -> tuple[IntArray, IntArray, IntArray]:
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
