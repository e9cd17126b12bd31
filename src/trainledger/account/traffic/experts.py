"""Expert-parallel traffic of one optimizer step: tokens sent to the experts they chose, and back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainledger.account.traffic.collectives import Collective, summed
from trainledger.account.traffic.step import Step
from trainledger.arrays import IntArray, ceil_div, ints
from trainledger.dtypes import bytes_of


def expert_traffic(step: Step) -> Iterator[Collective]:
    """Per MoE layer and micro-batch: dispatch and combine, forward and backward, balanced routing. [megatron-moe]

    Where ranks first exchange how many tokens go where, the calls are told apart by direction: what a rank sends to
    experts, or gets back from them, is all its tokens; what its own experts get and give back, the routing decides.
    """
    plans = step.plans
    split = plans.sp_ranks
    layers = np.zeros_like(step.own.pp_stage)
    size, counted = np.zeros_like(layers), np.zeros_like(layers)
    for index, block in enumerate(step.layers):
        if block.moe is not None:
            visits = ceil_div(step.tokens, split) * block.moe.top_k
            times = step.blocks[:, :, index] * step.batches
            layers = layers + times
            size = size + times * bytes_of(visits * step.model.hidden_size, step.dtype)[:, None]
            counted = counted + times * bytes_of(ints(block.moe.experts), "int64")
    if not layers.any():
        return
    if step.rules.counts_tokens:
        yield from _counted(step, layers, size, counted)
        return
    passes = 2 + step.recompute
    ep, etp = plans.ep, plans.etp
    if step.rules.experts_in_region:
        etp = np.where(ep == 1, 1, etp)
    what, cite = "routed tokens", "megatron-moe"
    yield summed("all_to_all", "ep", what, step.dtype, ep, 2 * passes * layers, 2 * passes * size, cite)
    gathered = passes * size * etp[:, None]
    yield summed("all_gather", "etp", what, step.dtype, etp, passes * layers, gathered, cite)
    yield summed("reduce_scatter", "etp", what, step.dtype, etp, passes * layers, gathered, cite)


def _counted(step: Step, layers: IntArray, size: IntArray, counted: IntArray) -> Iterator[Collective]:
    """An exchange of one count per expert, then dispatch and combine; the backward mirrors the two, without counts.

    Gradients of what came back go the way of the tokens, and those of what was sent come home.
    """
    ep, passes, forward = step.plans.ep, 2 + step.recompute, 1 + step.recompute
    yield summed("all_to_all", "ep", "token counts", "int64", ep, forward * layers, forward * counted)
    calls, total = passes * layers, passes * size
    yield summed("all_to_all", "ep", "tokens to experts", step.dtype, ep, calls, total, routed="out")
    yield summed("all_to_all", "ep", "tokens back", step.dtype, ep, calls, total, routed="in")
