"""GPipe: every forward, then every backward. [gpipe]

A run of one stage has no pipeline to fill: it accumulates, one micro-batch after the other.
"""

from __future__ import annotations

import numpy as np

from trainledger.arrays import IntArray
from trainledger.plans.plan import Plans
from trainledger.schedules import one_f_one_b
from trainledger.schedules.schedule import Op, Schedule


def ops(pp: int, vpp: int, num_microbatches: int, pp_stage: int) -> tuple[Op, ...]:
    """One stage's order."""
    if pp == 1:
        return one_f_one_b.ops(pp, vpp, num_microbatches, pp_stage)
    forwards = tuple(Op("forward", pp_stage, index) for index in range(num_microbatches))
    return (*forwards, *(op._replace(kind="backward") for op in forwards))


def in_flight(plans: Plans, pp_stage: IntArray) -> IntArray:
    """[plans, rows]: all m of them."""
    return np.where(plans.pp > 1, plans.num_microbatches, 1)[:, None] + np.zeros_like(pp_stage)


SCHEDULE = Schedule(name="gpipe", ops=ops, in_flight=in_flight)
