"""Which layers each pipeline stage holds: the StageTable of one (pp, vpp, layout).

Equal stages are one row; the row keeps the first stage that has it, which under 1F1B is the one with the most
micro-batches in flight.
"""

from __future__ import annotations

import dataclasses
from itertools import accumulate

import numpy as np

from trainledger.arrays import IntArray
from trainledger.errors import Refused
from trainledger.facts.model import Model


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageTable:
    """Rows are distinct stages.

    counts     [rows, slots]: how often the stage holds each slot of the TensorTable
    pp_stage   [rows]: the first stage of this kind
    last       [rows]: holds the output layer
    """

    counts: IntArray
    pp_stage: IntArray
    last: IntArray


def layers_per_chunk(num_layers: int, chunks: int, split: str, layout: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Layers of each virtual stage in pipeline order.

    divisible   equal, and refused otherwise [megatron: arguments.py]
    front       the first stages take one more
    less_ends   embedding and output count as a layer each, on the first and last stage [torchtitan: pipeline_parallel]

    >>> layers_per_chunk(10, 4, "front"), layers_per_chunk(30, 4, "less_ends")
    ((3, 3, 2, 2), (7, 8, 8, 7))
    """
    if layout:
        if len(layout) != chunks or sum(layout) != num_layers or min(layout) < 0:
            raise Refused(
                "pp-layout-adds-up",
                f"--pp-layout {','.join(map(str, layout))} has {len(layout)} stages and {sum(layout)} layers; "
                f"the plan has pp x vpp = {chunks} stages and the model {num_layers} layers",
            )
        return layout
    ends = 1 if split == "less_ends" and chunks > 1 else 0
    share, extra = divmod(num_layers + 2 * ends, chunks)
    if split == "divisible" and extra:
        raise Refused(
            "layers-divisible-by-pp",
            f"{num_layers} layers do not divide over pp x vpp = {chunks} stages (remainder {extra}); "
            "change pp or vpp, or give --pp-layout",
        )
    counts = [share + (index < extra) for index in range(chunks)]
    counts[0] -= ends
    counts[-1] -= ends
    return tuple(counts)


def stage_table(
    model: Model, pp: int, vpp: int, split: str, layout: tuple[int, ...] = (), *, mtp: bool = False
) -> StageTable:
    """The distinct stages of a pipeline; chunk c of pp x vpp runs on stage c mod pp."""
    chunks = layers_per_chunk(model.num_layers, pp * vpp, split, layout)
    kinds = np.zeros((model.num_layers, len(model.blocks)), dtype=np.int64)
    for index, block in enumerate(model.blocks):
        kinds[list(block.layers), index] = 1
    before = np.concatenate([np.zeros((1, len(model.blocks)), dtype=np.int64), np.cumsum(kinds, axis=0)])
    ends = np.array(list(accumulate(chunks)), dtype=np.int64)
    per_chunk = before[ends] - before[ends - np.array(chunks)]
    per_stage = per_chunk.reshape(vpp, pp, len(model.blocks)).sum(axis=0)
    first = np.arange(pp) == 0
    last = np.arange(pp) == pp - 1
    with_mtp = model.mtp_depths if mtp else 0
    counts = np.column_stack(
        [
            first,
            per_stage,
            last,
            last & (model.tied or with_mtp > 0) & (pp > 1),
            last * with_mtp,
        ]
    ).astype(np.int64)
    rows, index = np.unique(counts, axis=0, return_index=True)
    order = np.argsort(index)
    return StageTable(counts=rows[order], pp_stage=index[order].astype(np.int64), last=last[index[order]])
