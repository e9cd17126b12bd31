"""Backwards in two parts, of which the second is put off: the zero-bubble schedules of one chunk per stage.

Gradients of weights are nobody's input, so they can wait and fill the gaps of a pipeline. [zero-bubble: section 2]
"""

from __future__ import annotations

import numpy as np

from trainledger.arrays import IntArray
from trainledger.plans.plan import Plans
from trainledger.schedules.schedule import Op


def put_off(num_microbatches: int, pp_stage: int, ahead: int, waiting: int, *, newest: bool = False) -> tuple[Op, ...]:
    """`ahead` forwards, then backward and forward in turn; more than `waiting` weights do not wait.

    The oldest goes first, or the newest: then the first ones wait until the end.

    >>> "".join(op.kind[0] for op in put_off(4, 1, 1, 1))
    'fbfbwfbwfbww'
    """
    pending: list[int] = []
    ahead = min(ahead, num_microbatches)
    ops = [Op("forward", pp_stage, index) for index in range(ahead)]
    for index in range(num_microbatches):
        ops.append(Op("backward", pp_stage, index))
        pending.append(index)
        if len(pending) > waiting:
            ops.append(Op("weight", pp_stage, pending.pop(-1 if newest else 0)))
        if ahead + index < num_microbatches:
            ops.append(Op("forward", pp_stage, ahead + index))
    return (*ops, *(Op("weight", pp_stage, index) for index in pending))


def whole(plans: Plans, ahead: IntArray) -> IntArray:
    """[plans, rows]: micro-batches held whole: as many as go ahead of the first backward."""
    return np.minimum(plans.num_microbatches[:, None], ahead)


def left(plans: Plans, ahead: IntArray, waiting: IntArray) -> IntArray:
    """[plans, rows]: micro-batches that wait for their weights while as many as can be are held whole."""
    return np.minimum(plans.num_microbatches[:, None] - whole(plans, ahead), waiting)
