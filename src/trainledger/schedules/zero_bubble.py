"""PyTorch's zero bubble: interleaved, weights put off by as many backwards as stages lie before.

What it calls ZB1P; autograd's backward of inputs frees nothing that the weights' does not need as well, so a chunk is
held until the gradients of its weights are there. [torch: distributed/pipelining/schedules.py
ScheduleInterleavedZeroBubble]
"""

from __future__ import annotations

import numpy as np

from trainledger.arrays import IntArray
from trainledger.plans.plan import Plans
from trainledger.schedules.in_turn import ahead, in_turn
from trainledger.schedules.schedule import Op, Schedule

HOPS = 1
"""Forwards more for each stage that follows: a backward of inputs comes back in half the time of a whole one."""


def ops(pp: int, vpp: int, num_microbatches: int, pp_stage: int) -> tuple[Op, ...]:
    """One stage's order."""
    return in_turn(pp, vpp, num_microbatches, pp_stage, hops=HOPS, delay=pp_stage)


def in_flight(plans: Plans, pp_stage: IntArray) -> IntArray:
    """[plans, rows]: min(m v, (v - 1) r + p) on every stage, r a round."""
    whole = (plans.num_microbatches * plans.vpp)[:, None]
    return np.minimum(whole, ahead(plans, pp_stage, HOPS) + pp_stage + 1)


SCHEDULE = Schedule(name="zero-bubble", ops=ops, in_flight=in_flight, releases="weight", turns=True)
