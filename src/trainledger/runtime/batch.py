"""The tokens of a run: the same global batch whatever the layout, and each rank's part of it."""

from __future__ import annotations

from typing import Protocol

import torch

from trainledger.plans.ranks import Place
from trainledger.runtime.spec import RunSpec

Batch = tuple[torch.Tensor, torch.Tensor]
"""(tokens, labels), int64 [sequences, seq] each: a label is the token that follows."""

SEED_STRIDE = 1_000_003
"""More than a run has steps, so that no two steps of any two seeds draw the same."""


class Source(Protocol):
    """Where the tokens of a run come from: the same step gives the same global batch in every layout."""

    def __call__(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step, num_microbatches of [mbs, seq], sequences whole."""
        ...


class Drawn:
    """Tokens that are drawn from the seed and the step, for runs whose tokens do not matter."""

    def __init__(self, spec: RunSpec, place: Place) -> None:
        self._spec = spec
        self._place = place

    def __call__(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step."""
        return local_batches(self._spec, self._place, step)


def global_batch(spec: RunSpec, step: int) -> Batch:
    """(tokens, labels) [sequences, seq] of one optimizer step, drawn from `spec.seed` and the step."""
    generator = torch.Generator().manual_seed(spec.seed * SEED_STRIDE + step)
    drawn = torch.randint(0, spec.model.vocab_size, (spec.sequences_per_step, spec.seq + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def local_batches(spec: RunSpec, place: Place, step: int) -> list[Batch]:
    """This rank's micro-batches [mbs, seq] of a step, sequences whole; context parallelism cuts them later."""
    plan = spec.plan
    mbs, num = plan["mbs"], plan["num_microbatches"]
    replica = place.dp_replicate * plan["dp_shard"] + place.dp_shard
    own = slice(replica * mbs * num, (replica + 1) * mbs * num)
    tokens, labels = global_batch(spec, step)
    return list(zip(tokens[own].split(mbs), labels[own].split(mbs), strict=True))
