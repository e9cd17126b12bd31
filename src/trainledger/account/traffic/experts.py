"""Expert-parallel traffic of one optimizer step: tokens sent to the experts they chose, and back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainledger.account.traffic.collectives import Collective, summed
from trainledger.account.traffic.step import Step
from trainledger.arrays import ceil_div
from trainledger.dtypes import bytes_of


def expert_traffic(step: Step) -> Iterator[Collective]:
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
