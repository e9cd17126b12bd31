"""1F1B: as many forwards as stages follow, then one forward and one backward in turn. [narayanan: 2.2.1]"""

from __future__ import annotations

import numpy as np

from trainledger.arrays import IntArray
from trainledger.plans.plan import Plans
from trainledger.schedules.in_turn import in_turn
from trainledger.schedules.schedule import Op, Schedule


def ops(pp: int, vpp: int, num_microbatches: int, pp_stage: int) -> tuple[Op, ...]:
    """One stage's order."""
    return in_turn(pp, vpp, num_microbatches, pp_stage, hops=1)


def in_flight(plans: Plans, pp_stage: IntArray) -> IntArray:
    """[plans, rows]: min(m, p - i). [narayanan: 2.2.1] [megatron: schedules.py 2277-2279]"""
    return np.minimum(plans.num_microbatches[:, None], plans.pp[:, None] - pp_stage)


SCHEDULE = Schedule(name="1f1b", ops=ops, in_flight=in_flight)
