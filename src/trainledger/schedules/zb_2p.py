"""ZB-2p: what the zero-bubble fork's scheduler makes of room for 2 p micro-batches. [zero-bubble: section 3.1]

So many forwards go ahead that no stage waits for its first backward, 2 (p - i) - 1, and then weights wait while there
is anything else to do: 3 i + 2 of them. Found by running that scheduler at equal times of forward, backward and
weights, for 4 to 32 stages [zero-bubble-fork: auto_schedule.py]. Where weights take half the time it lets 4 i + 2 of
them wait, all that its room allows; the peaks that the paper prints are nearer to the first.
"""

from __future__ import annotations

import numpy as np

from trainledger.arrays import IntArray
from trainledger.plans.plan import Plans
from trainledger.schedules.put_off import left, put_off, whole
from trainledger.schedules.schedule import Op, Schedule


def ops(pp: int, vpp: int, num_microbatches: int, pp_stage: int) -> tuple[Op, ...]:
    """One stage's order; without a pipeline nothing is put off."""
    del vpp
    return put_off(num_microbatches, pp_stage, 2 * (pp - pp_stage) - 1, 3 * pp_stage + 2 if pp > 1 else 0)


def in_flight(plans: Plans, pp_stage: IntArray) -> IntArray:
    """[plans, rows]: min(m, 2 (p - i) - 1)."""
    return whole(plans, _ahead(plans, pp_stage))


def inputs_kept(plans: Plans, pp_stage: IntArray) -> IntArray:
    """[plans, rows]: 3 i + 2 of them, where there are as many micro-batches."""
    return left(plans, _ahead(plans, pp_stage), np.where(plans.pp[:, None] > 1, 3 * pp_stage + 2, 0))


def _ahead(plans: Plans, pp_stage: IntArray) -> IntArray:
    return 2 * (plans.pp[:, None] - pp_stage) - 1


SCHEDULE = Schedule(name="zb-2p", ops=ops, in_flight=in_flight, inputs_kept=inputs_kept, front_heavy=False)
