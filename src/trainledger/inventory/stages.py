"""Which layers each pipeline stage holds: the StageTable of one (pp, vpp, layout).

Equal stages are one row; the row keeps the first stage that has it, which has the most micro-batches in flight under
every schedule that is front-heavy (schedules/schedule.py). Under the others each stage is a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from trainledger.arrays import IntArray
from trainledger.facts.model import Model
from trainledger.plans.split import compute_costs, layers_per_chunk


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageTable:
    """Rows are distinct stages, or all of them.

    counts     [rows, slots]: how often the stage holds each slot, in the order of slots.py
    pp_stage   [rows]: the first stage of this kind
    earlier    [rows, kinds, kinds]: layers of the second kind of block before the stage's first of the first kind
    later      [rows, kinds, kinds]: the same after its last
    first      [rows, kinds]: layers of each kind of block among the first so many of each chunk
    """

    counts: IntArray
    pp_stage: IntArray
    earlier: IntArray
    later: IntArray
    first: IntArray


def stage_table(
    model: Model,
    pp: int,
    vpp: int,
    split: str,
    layout: tuple[int, ...] = (),
    *,
    mtp: bool = False,
    every: bool = False,
    first: int = 0,
) -> StageTable:
    """The distinct stages of a pipeline, or `every` one; chunk c of pp x vpp runs on stage c mod pp."""
    chunks = layers_per_chunk(model.num_layers, pp * vpp, split, layout, compute_costs(model))
    kinds = np.zeros((model.num_layers, len(model.blocks)), dtype=np.int64)
    for index, block in enumerate(model.blocks):
        kinds[list(block.layers), index] = 1
    before = np.concatenate([np.zeros((1, len(model.blocks)), dtype=np.int64), np.cumsum(kinds, axis=0)])
    ends = np.array(list(accumulate(chunks)), dtype=np.int64)
    starts = ends - np.array(chunks)
    shape = (vpp, pp, len(model.blocks))
    per_stage = (before[ends] - before[starts]).reshape(shape).sum(axis=0)
    ahead = (before[np.minimum(starts + first, ends)] - before[starts]).reshape(shape).sum(axis=0)
    head = np.arange(pp) == 0
    last = np.arange(pp) == pp - 1
    with_mtp = model.mtp_depths if mtp else 0
    counts = np.column_stack(
        [
            head,
            per_stage,
            last,
            last & (model.tied or with_mtp > 0) & (pp > 1),
            last * with_mtp,
        ]
    ).astype(np.int64)
    index = np.arange(pp, dtype=np.int64)
    if not every:
        index = np.sort(np.unique(counts, axis=0, return_index=True)[1]).astype(np.int64)
    earlier, later = _order(kinds, chunks, pp, index.tolist())
    return StageTable(counts=counts[index], pp_stage=index, earlier=earlier, later=later, first=ahead[index])


def _order(kinds: IntArray, chunks: Sequence[int], pp: int, stages: list[int]) -> tuple[IntArray, IntArray]:
    """[stages, kinds, kinds]: layers of each kind before a stage's first, and after its last, of each kind."""
    width = kinds.shape[1]
    earlier, later = np.zeros((2, len(stages), width, width), dtype=np.int64)
    if width == 1:
        return earlier, later
    ends = list(accumulate(chunks))
    for row, stage in enumerate(stages):
        own = np.concatenate([kinds[ends[c] - chunks[c] : ends[c]] for c in range(stage, len(chunks), pp)])
        for kind in np.flatnonzero(own.any(axis=0)):
            places = np.flatnonzero(own[:, kind])
            earlier[row, kind] = own[: places[0]].sum(axis=0)
            later[row, kind] = own[places[-1] + 1 :].sum(axis=0)
    return earlier, later
