"""What a pipeline schedule says: in which order a stage works, and how much of that it holds at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from trainledger.arrays import IntArray
from trainledger.plans.plan import Plans

Kind = Literal["forward", "backward", "weight"]


class Op(NamedTuple):
    """One piece of work of a stage.

    kind         forward; backward: gradients, of inputs alone where a `weight` of the same follows later; weight:
                 the gradients of weights that such a backward left out
    chunk        the virtual stage, counted over the whole pipeline: chunk c runs on stage c mod pp
    microbatch   from 0
    """

    kind: Kind
    chunk: int
    microbatch: int


Ops = Callable[[int, int, int, int], tuple[Op, ...]]
"""(pp, vpp, num_microbatches, pp_stage) to the stage's work of one step, in order."""
Count = Callable[[Plans, IntArray], IntArray]
"""(plans, pp_stage [plans, rows]) to a number of chunk-micro-batches [plans, rows]."""


def nothing(plans: Plans, pp_stage: IntArray) -> IntArray:
    """[plans, rows]: zeros."""
    return np.zeros((len(plans), pp_stage.shape[1]), dtype=np.int64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule by its name: the op list, and closed forms that are tested against it.

    in_flight    chunk-micro-batches whose activations a stage holds whole at its worst moment
    inputs_kept  those that at the same moment have had their backward and wait for the gradients of their weights: they
                 keep what each linear layer multiplies for those, its input and the gradient of its output
    releases     what lets go of a whole one: its backward, or its weight where the engine's backward of inputs frees
                 nothing
    turns        a stage takes turns among vpp chunks; without it vpp is 1
    front_heavy  of two stages with equal layers the earlier never holds less
    """

    name: str
    ops: Ops
    in_flight: Count
    inputs_kept: Count = nothing
    releases: Literal["backward", "weight"] = "backward"
    turns: bool = False
    front_heavy: bool = True
