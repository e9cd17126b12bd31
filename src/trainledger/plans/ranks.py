"""Where a rank stands: its coordinate along every axis of a plan.

The order of the mesh is pp, dp_replicate, dp_shard, cp, tp, the last one fastest, as torchtitan lays it out. Expert
parallelism borrows ranks of dp_shard x cp: ep is their fastest part. [torchtitan: parallel_dims]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

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


_SHARED: dict[str, Callable[[Place, int], object]] = {
    "world": lambda _at, _pp: (),
    "tp": lambda at, _pp: (at.pp, at.dp_replicate, at.dense),
    "cp": lambda at, _pp: (at.pp, at.dp_replicate, at.dp_shard, at.tp),
    "pp": lambda at, _pp: (at.dp_replicate, at.dense, at.tp),
    "ep": lambda at, _pp: (at.pp, at.dp_replicate, at.expert, at.tp),
    "dp": lambda at, _pp: (at.pp, at.tp),
    "dp_shard": lambda at, _pp: (at.pp, at.dp_replicate, at.tp),
    "dp_replicate": lambda at, _pp: (at.pp, at.dense, at.tp),
    "expert_dp": lambda at, _pp: (at.pp, at.ep, at.tp),
    "expert_dp_shard": lambda at, _pp: (at.pp, at.dp_replicate, at.ep, at.tp),
    "embedding": lambda at, pp: (0 if at.pp in (0, pp - 1) else 1 + at.pp, at.dp_replicate, at.dense, at.tp),
}
"""What the ranks of a group have in common, from the place of one and the number of pipeline stages."""


def groups_of(plan: Mapping[str, int], group: str) -> tuple[tuple[int, ...], ...]:
    """Every group of this name: the ranks in each.

    >>> plan = {"pp": 1, "dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 1, "ep": 2}
    >>> groups_of(plan, "ep"), groups_of(plan, "world")
    (((0, 1), (2, 3)), ((0, 1, 2, 3),))
    """
    shared, parts = _SHARED[group], dict[object, list[int]]()
    for rank in range(world_size(plan)):
        parts.setdefault(shared(place_of(plan, rank), plan["pp"]), []).append(rank)
    return tuple(map(tuple, parts.values()))


def peers_of(plan: Mapping[str, int], group: str, rank: int) -> tuple[int, ...]:
    """The ranks of the group of this name that `rank` is in.

    >>> plan = {"pp": 1, "dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 2, "ep": 2}
    >>> [peers_of(plan, group, 3) for group in ("tp", "ep", "expert_dp_shard", "dp_shard")]
    [(2, 3), (1, 3), (3, 7), (1, 3, 5, 7)]
    """
    shared, pp = _SHARED[group], plan["pp"]
    own = shared(place_of(plan, rank), pp)
    return tuple(other for other in range(world_size(plan)) if shared(place_of(plan, other), pp) == own)
