"""Expert-parallel traffic of one optimizer step: tokens sent to the experts they chose, and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from trainledger.account.again import experts_again
from trainledger.account.traffic.collectives import Collective, Op, summed
from trainledger.account.traffic.step import Step
from trainledger.arrays import IntArray, ceil_div, ints
from trainledger.dtypes import bytes_of


def expert_traffic(step: Step) -> Iterator[Collective]:
    """Per MoE layer and micro-batch: dispatch and combine, forward and backward, balanced routing. [megatron-moe]

    Where ranks first exchange how many tokens go where, the calls are told apart by direction: what a rank sends to
    experts, or gets back from them, is all its tokens; what its own experts get and give back, the routing decides.
    """
    once = _routed(step, step.blocks)
    if not once.calls.any():
        return
    if step.rules.counts_tokens:
        yield from _counted(step, once, _again(step, "all_to_all"))
        return
    ep, etp = step.plans.ep, step.plans.etp
    if step.rules.experts_in_region:
        etp = np.where(ep == 1, 1, etp)
    what, cite = "routed tokens", "megatron-moe"
    within: tuple[Op, ...] = ("all_gather", "reduce_scatter")
    again = _again(step, "all_to_all")
    calls, size = 2 * once.calls + again.calls, 2 * once.tokens + again.tokens
    yield summed("all_to_all", "ep", what, step.dtype, ep, 2 * calls, 2 * size, cite)
    for op in within:
        again = _again(step, op)
        calls, size = 2 * once.calls + again.calls, 2 * once.tokens + again.tokens
        yield summed(op, "etp", what, step.dtype, etp, calls, size * etp[:, None], cite)


class _Routed(NamedTuple):
    """[plans, rows]: layers x micro-batches, bytes of the tokens that they send, and of counts per expert."""

    calls: IntArray
    tokens: IntArray
    counts: IntArray


def _again(step: Step, exchange: Op) -> _Routed:
    """The pass of the layers that do this exchange again."""
    return _routed(step, step.also(experts_again(step.setting, exchange)))


def _routed(step: Step, blocks: IntArray) -> _Routed:
    """One pass of the layers in `blocks` [plans, rows, kinds]."""
    calls = np.zeros_like(step.own.pp_stage)
    tokens, counts = np.zeros_like(calls), np.zeros_like(calls)
    for index, block in enumerate(step.layers):
        if block.moe is not None:
            visits = ceil_div(step.tokens, step.plans.sp_ranks) * block.moe.top_k
            times = blocks[:, :, index] * step.batches
            calls = calls + times
            tokens = tokens + times * bytes_of(visits * step.model.hidden_size, step.dtype)[:, None]
            counts = counts + times * bytes_of(ints(block.moe.experts), "int64")
    return _Routed(calls, tokens, counts)


def _counted(step: Step, once: _Routed, again: _Routed) -> Iterator[Collective]:
    """An exchange of one count per expert, then dispatch and combine; the backward mirrors the two, without counts.

    Gradients of what came back go the way of the tokens, and those of what was sent come home.
    """
    ep = step.plans.ep
    counted = once.counts + again.counts
    yield summed("all_to_all", "ep", "token counts", "int64", ep, once.calls + again.calls, counted)
    calls, total = 2 * once.calls + again.calls, 2 * once.tokens + again.tokens
    yield summed("all_to_all", "ep", "tokens to experts", step.dtype, ep, calls, total, routed="out")
    yield summed("all_to_all", "ep", "tokens back", step.dtype, ep, calls, total, routed="in")
