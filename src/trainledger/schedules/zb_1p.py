"""ZB-1p: what the zero-bubble fork's scheduler makes of room for p micro-batches. [zero-bubble: section 3.1]

Found by running that scheduler [zero-bubble-fork: auto_schedule.py], at equal times of forward, backward and weights
for 4 to 32 stages and at many unequal ones for 8: 1F1B with each weight i backwards late on stage i. It differs from
ZB-H1 in which ones wait, not in how many.
"""

from __future__ import annotations

from trainledger.schedules import zb_h1
from trainledger.schedules.put_off import put_off
from trainledger.schedules.schedule import Op, Schedule


def ops(pp: int, vpp: int, num_microbatches: int, pp_stage: int) -> tuple[Op, ...]:
    """One stage's order."""
    del vpp
    return put_off(num_microbatches, pp_stage, pp - pp_stage, pp_stage)


in_flight, inputs_kept = zb_h1.in_flight, zb_h1.inputs_kept
SCHEDULE = Schedule(name="zb-1p", ops=ops, in_flight=in_flight, inputs_kept=inputs_kept, front_heavy=False)
