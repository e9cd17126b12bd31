"""Context-parallel traffic of one optimizer step: keys and values of each attention layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from trainledger.account.again import context_again
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
    kind, dtype = step.setting.cp_comm, step.dtype
    once = _attention_bytes(step, step.blocks)
    forward = once + _attention_bytes(step, step.also(context_again(step.setting)))
    if kind == "ring":
        hops = (cp - 1)[:, None]
        back = cp[:, None] * once.calls
        for op in ("send", "recv"):
            there = hops * forward.calls
            yield summed(op, "cp", "k and v", dtype, cp, there, hops * forward.kv, "ring-attention")
            yield summed(op, "cp", "k, v and gradients", dtype, cp, back, 2 * hops * once.kv, "ring-attention")
    elif kind == "all_to_all":
        both = forward + once
        yield summed("all_to_all", "cp", "q and output", dtype, cp, 2 * both.calls, both.qo, "ulysses")
        yield summed("all_to_all", "cp", "k and v", dtype, cp, 2 * both.calls, both.kv, "ulysses")
    else:
        gathers = forward + once if step.rules.regathers_kv else forward
        ranks = cp[:, None]
        yield summed("all_gather", "cp", "k and v", dtype, cp, 2 * gathers.calls, ranks * gathers.kv, "torchtitan-cp")
        calls, whole = 2 * once.calls, ranks * once.kv
        yield summed("reduce_scatter", "cp", "gradients of k, v", dtype, cp, calls, whole, "torchtitan-cp")


def _template(step: Step) -> Iterator[Collective]:
    """PyTorch's ring-attention template: k and v travel as one tensor, in the same way forward and backward. [torch-cp]

    ring         cp - 1 hops, each an all-to-all in which everything goes to the neighbour
    all_gather   one gather
    Under both their gradients make cp hops, the last one home, in fp32. A recomputed block repeats its forward whole,
    for the output of attention is saved behind it.
    """
    cp = step.plans.cp
    once = _attention_bytes(step, step.blocks)
    passes = once + once + _attention_bytes(step, step.again)
    if step.setting.cp_comm == "ring":
        hops = (cp - 1)[:, None]
        calls, total = hops * passes.calls, hops * passes.kv
        yield summed("all_to_all", "cp", "k and v", step.dtype, cp, calls, total, "torch-cp", hop=True)
    else:
        whole = cp[:, None] * passes.kv
        yield summed("all_gather", "cp", "k and v", step.dtype, cp, passes.calls, whole, "torch-cp")
    hops, grads = cp[:, None], _attention_bytes(step, step.blocks, "fp32")
    calls, total = hops * grads.calls, hops * grads.kv
    yield summed("all_to_all", "cp", "gradients of k, v", "fp32", cp, calls, total, "torch-cp", hop=True)


@dataclasses.dataclass(frozen=True, slots=True)
class _Passed:
    """[plans, rows]: attention layers x micro-batches, bytes of k and v in them, bytes of q and output."""

    calls: IntArray
    kv: IntArray
    qo: IntArray

    def __add__(self, other: _Passed) -> _Passed:
        return _Passed(self.calls + other.calls, self.kv + other.kv, self.qo + other.qo)


def _attention_bytes(step: Step, blocks: IntArray, dtype: str = "") -> _Passed:
    """One pass of the layers in `blocks` [plans, rows, kinds]."""
    tp, width = step.plans.tp, dtype or step.dtype
    layers = np.zeros_like(step.own.pp_stage)
    kv_bytes, qo_bytes = np.zeros_like(layers), np.zeros_like(layers)
    for index, block in enumerate(step.layers):
        if block.attention is None:
            continue
        attention = block.attention
        times = blocks[:, :, index] * step.batches
        kv_heads = attention.heads if attention.kind == "mla" else attention.kv_heads
        per_head = attention.qk_head_dim + attention.v_head_dim
        if step.rules.rotates_kv:
            per_head = 2 * max(attention.qk_head_dim, attention.v_head_dim)
        layers = layers + times
        kv_bytes = kv_bytes + times * bytes_of(step.tokens * ceil_div(kv_heads, tp) * per_head, width)[:, None]
        heads = ceil_div(attention.heads, tp)
        qo_bytes = qo_bytes + times * bytes_of(step.tokens * heads * per_head, width)[:, None]
    return _Passed(layers, kv_bytes, qo_bytes)
