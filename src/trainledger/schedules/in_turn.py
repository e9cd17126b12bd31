"""Work in turns: forwards first, then one forward and one backward, as 1F1B and its relatives have it.

A rank goes round its chunks, a round of micro-batches on each before the next. [narayanan: 2.2]
[torch: distributed/pipelining/schedules.py _get_1f1b_rank_ops]
"""

from __future__ import annotations

import numpy as np

from trainledger.arrays import IntArray
from trainledger.plans.plan import Plans
from trainledger.schedules.schedule import Kind, Op


def rounds(plans: Plans) -> IntArray:
    """[plans]: micro-batches that a chunk takes before the next has its turn: pp, or as many as make rounds equal."""
    return plans.num_microbatches // np.maximum(plans.num_microbatches // plans.pp, 1)


def ahead(plans: Plans, pp_stage: IntArray, hops: int) -> IntArray:
    """[plans, rows]: forwards before the first pair: a round on each further chunk, `hops` per stage that follows."""
    chunks = (plans.vpp - 1) * rounds(plans)
    return chunks[:, None] + hops * (plans.pp[:, None] - 1 - pp_stage)


def in_turn(
    pp: int, vpp: int, num_microbatches: int, pp_stage: int, *, hops: int, delay: int | None = None
) -> tuple[Op, ...]:
    """One stage's order; with `delay` its backwards are split, and the weights wait for that many further backwards.

    >>> [f"{op.kind[0]}{op.microbatch}" for op in in_turn(2, 1, 3, 0, hops=1)]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    each = num_microbatches // max(num_microbatches // pp, 1)
    if vpp > 1 and num_microbatches % each:
        raise AssertionError(f"{num_microbatches} micro-batches do not come in rounds of {each}")

    def work(kind: Kind, index: int) -> Op:
        turn, place = divmod(index, each)
        local = turn % vpp if kind == "forward" else vpp - 1 - turn % vpp
        return Op(kind, local * pp + pp_stage, turn // vpp * each + place)

    whole = num_microbatches * vpp
    first = min((vpp - 1) * each + hops * (pp - 1 - pp_stage), whole)
    ops = [work("forward", index) for index in range(first)]
    for index in range(whole):
        if first + index < whole:
            ops.append(work("forward", first + index))
        ops.append(work("backward", index))
        if delay is not None and index >= delay:
            ops.append(work("weight", index - delay))
    if delay is not None:
        ops += [work("weight", index) for index in range(max(whole - delay, 0), whole)]
    return tuple(ops)
