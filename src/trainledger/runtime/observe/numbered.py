"""Process groups as their backends know them: who is in each, and how many collectives it was given.

A dispatch mode sees the operations of its own thread and of that thread's autograd. A backend numbers whatever it is
given, by whichever thread: as many numbers as were seen means that nothing was hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch.distributed as dist

# private: nothing public lists the groups of a process
from torch.distributed.distributed_c10d import _world

from trainledger.runtime.observe.observation import Group

NUMBERING = "gloo"
"""Numbers collectives of every kind, sends and receives among them. [torch: csrc/distributed/c10d/ProcessGroupGloo.cpp]
NCCL leaves out those two, and the fake group numbers nothing."""


def numbers() -> dict[str, int]:
    """The number of the last collective of each group that numbers them, by PyTorch's name of it."""
    return {
        # private: the number is for PyTorch's own debugging, and its stubs leave it out
        group.group_name: group._get_sequence_number_for_group()  # pyright: ignore[reportAttributeAccessIssue]
        for group in _world.pg_map
        if dist.get_backend(group) == NUMBERING
    }


def called(before: Mapping[str, int], seen: Iterable[str]) -> tuple[Group, ...]:
    """Every group that was called since `before`, with PyTorch's names; `seen` has the group of each call."""
    counted, now = Counter(seen), numbers()
    ranks = {group.group_name: tuple(dist.get_process_group_ranks(group)) for group in _world.pg_map}
    issued = {name: number - before.get(name, 0) for name, number in now.items()}
    return tuple(
        Group(name=name, ranks=ranks[name], seen=counted[name], issued=issued.get(name))
        for name in ranks
        if counted[name] or issued.get(name)
    )
