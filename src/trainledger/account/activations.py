"""Micro-batches of which a stage keeps activations at once."""

from __future__ import annotations

import numpy as np

from trainledger.arrays import IntArray
from trainledger.plans.plan import Plans


def in_flight_chunks(plans: Plans, pp_stage: IntArray, schedule: str) -> IntArray:
    """[plans, rows]: chunk-micro-batches whose activations a stage holds at once. [narayanan: 2.2, 2.3] [zero-bubble]

    1F1B: min(m, p - i), each of all the stage's layers. The others take turns in rounds of r = p micro-batches, or as
    many as make the rounds equal: interleaved min(m v, 2 (p - i - 1) + (v - 1) r + 1) chunks; zero-bubble min(m v,
    (v - 1) r + p) on every stage, for a chunk is held until the gradients of its weights are there.
    """
    pp, vpp, batches = plans.pp[:, None], plans.vpp[:, None], plans.num_microbatches[:, None]
    if schedule == "1f1b":
        return np.minimum(batches, pp - pp_stage) * vpp
    turns = (vpp - 1) * (batches // np.maximum(batches // pp, 1))
    if schedule == "zero-bubble":
        return np.minimum(batches * vpp, turns + pp + np.zeros_like(pp_stage))
    return np.minimum(batches * vpp, 2 * (pp - pp_stage - 1) + turns + 1)
