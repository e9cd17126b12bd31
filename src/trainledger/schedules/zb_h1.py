"""ZB-H1: 1F1B with the weights of i micro-batches left to the end of the step, on stage i. [zero-bubble: section 2.1]

The order is that of the patch which the authors offer for other people's Megatron: from the i-th backward on, weights
follow at once, and only what came before waits. [zero-bubble-fork: light/zbpp_light/auto_schedule.py]
"""

from __future__ import annotations

from trainledger.arrays import IntArray
from trainledger.plans.plan import Plans
from trainledger.schedules.put_off import left, put_off, whole
from trainledger.schedules.schedule import Op, Schedule


def ops(pp: int, vpp: int, num_microbatches: int, pp_stage: int) -> tuple[Op, ...]:
    """One stage's order."""
    del vpp
    return put_off(num_microbatches, pp_stage, pp - pp_stage, pp_stage, newest=True)


def in_flight(plans: Plans, pp_stage: IntArray) -> IntArray:
    """[plans, rows]: min(m, p - i), as under 1F1B."""
    return whole(plans, plans.pp[:, None] - pp_stage)


def inputs_kept(plans: Plans, pp_stage: IntArray) -> IntArray:
    """[plans, rows]: i of them, so that every stage has p in all. [zero-bubble: section 2.3]"""
    return left(plans, plans.pp[:, None] - pp_stage, pp_stage)


SCHEDULE = Schedule(name="zb-h1", ops=ops, in_flight=in_flight, inputs_kept=inputs_kept, front_heavy=False)
