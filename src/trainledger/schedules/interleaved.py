"""Interleaved 1F1B: a rank goes round its vpp chunks. [narayanan: 2.2.2]

Megatron's rounds are of pp micro-batches, PyTorch's of as many as make them equal; where Megatron runs the two agree.
"""

from __future__ import annotations

import numpy as np

from trainledger.arrays import IntArray
from trainledger.plans.plan import Plans
from trainledger.schedules.in_turn import ahead, in_turn
from trainledger.schedules.schedule import Op, Schedule

HOPS = 2
"""Forwards more for each stage that follows: there and back, since other chunks fill the time between."""


def ops(pp: int, vpp: int, num_microbatches: int, pp_stage: int) -> tuple[Op, ...]:
    """One stage's order."""
    return in_turn(pp, vpp, num_microbatches, pp_stage, hops=HOPS)


def in_flight(plans: Plans, pp_stage: IntArray) -> IntArray:
    """[plans, rows]: min(m v, 2 (p - i - 1) + (v - 1) r + 1), r a round. [megatron: schedules.py 960-979]"""
    whole = (plans.num_microbatches * plans.vpp)[:, None]
    return np.minimum(whole, ahead(plans, pp_stage, HOPS) + 1)


SCHEDULE = Schedule(name="interleaved", ops=ops, in_flight=in_flight, turns=True)
