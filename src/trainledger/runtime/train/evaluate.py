"""The held-out loss: the mean over sequences that no rank trains on, the same figure in every layout."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from trainledger.runtime.batch import Batch
from trainledger.runtime.data.token_file import TokenFile
from trainledger.runtime.program import Program


class HeldOut:
    """Held-out sequences of a file, shared out to the replicas in turn.

    sequences   how many an evaluation takes: those that are asked for, or all that the file has
    """

    def __init__(self, file: TokenFile, program: Program, asked: int = 0) -> None:
        spec = program.spec
        self._tokens = file.tokens()
        self._program = program
        self._seq, self._mbs = spec.seq, spec.plan["mbs"]
        place = program.world.place
        self._replica = place.dp_replicate * spec.plan["dp_shard"] + place.dp_shard
        self._replicas = spec.plan["dp_replicate"] * spec.plan["dp_shard"]
        there = file.sequences(spec.seq)
        self.sequences = min(asked, there) if asked else there

    def loss(self) -> float:
        """The mean over all of them; collective, between two steps."""
        own = range(self._replica, self.sequences, self._replicas)
        mean = self._program.evaluate(self._batches(own), len(own))
        # what no rank of a pipeline but the last computes, and what tp and cp compute several times, weighs alike
        total = torch.tensor([0.0, 0.0] if mean is None else [mean * len(own), len(own)], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total[0] / total[1])

    def _batches(self, own: range) -> Iterator[Batch]:
        """Micro-batches [mbs, seq], as many on every rank; sequences that fill them up come last."""
        each = -(-self.sequences // self._replicas)
        wanted = [*own, *[0] * (-(-each // self._mbs) * self._mbs - len(own))]
        for first in range(0, len(wanted), self._mbs):
            rows = [self._sequence(index) for index in wanted[first : first + self._mbs]]
            both = torch.stack(rows)
            yield both[:, :-1], both[:, 1:]

    def _sequence(self, index: int) -> torch.Tensor:
        """Tokens [seq + 1]: those of the sequence, and the label of its last one."""
        first = index * self._seq
        return torch.from_numpy(self._tokens[first : first + self._seq + 1].astype("int64"))
