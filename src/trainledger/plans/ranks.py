"""Where a rank stands: its coordinate along every axis of a plan.

The order of the mesh is pp, dp_replicate, dp_shard, cp, tp, the last one fastest, as torchtitan lays it out. Expert
parallelism borrows ranks of dp_shard x cp: ep is their fastest part. [torchtitan: parallel_dims]
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Coordinates of one rank.

    dense    index among the ranks that divide dense states: dp_shard x cp
    expert   index among the ranks that divide the same routed experts
    ep       which part of the routed experts this rank owns
    """

    rank: int
    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    dense: int
    expert: int
    ep: int


MESH = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes of the device mesh, slowest first."""


def world_size(plan: Mapping[str, int]) -> int:
    """Ranks of one plan, given as the row of a Plans.

    >>> world_size({"pp": 2, "dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 8})
    64
    """
    size = 1
    for axis in MESH:
        size *= plan[axis]
    return size


def place_of(plan: Mapping[str, int], rank: int) -> Place:
    """The coordinates of `rank`.

    >>> plan = {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 2, "tp": 2, "ep": 2}
    >>> place_of(plan, 13)
    Place(rank=13, pp=1, dp_replicate=0, dp_shard=1, cp=0, tp=1, dense=2, expert=1, ep=0)
    """
    if not 0 <= rank < world_size(plan):
        raise AssertionError(f"rank {rank} is not one of {world_size(plan)}")
    at: dict[str, int] = {}
    rest = rank
    for axis in reversed(MESH):
        rest, at[axis] = divmod(rest, plan[axis])
    dense = at["dp_shard"] * plan["cp"] + at["cp"]
    expert, ep = divmod(dense, plan["ep"])
    return Place(rank=rank, dense=dense, expert=expert, ep=ep, **at)
