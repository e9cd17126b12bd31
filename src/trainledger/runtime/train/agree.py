"""What all ranks learn of a step, so that all of them decide alike."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from trainledger.runtime.program import Stepped


class Agreed(NamedTuple):
    """One step of the whole job.

    loss         the mean over all its tokens
    asked        somebody asks the run to end
    held_bytes   of the rank that held most
    """

    loss: float
    asked: bool
    held_bytes: int


def agree_on(stepped: Stepped, *, asked: bool, held_bytes: int) -> Agreed:
    """Collective. Every rank that computes a loss has as many tokens, some of them those of another rank of tp."""
    loss = stepped.loss
    sums = torch.tensor([loss or 0.0, float(loss is not None), float(asked)], dtype=torch.float64)
    dist.all_reduce(sums)
    total, ranks, asking = sums.tolist()
    return Agreed(total / ranks, asking > 0, most(held_bytes))


def most(amount: int) -> int:
    """The largest of all ranks; collective."""
    found = torch.tensor(amount, dtype=torch.int64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def total(amount: int) -> int:
    """The sum over all ranks; collective."""
    found = torch.tensor(amount, dtype=torch.int64)
    dist.all_reduce(found)
    return int(found)
