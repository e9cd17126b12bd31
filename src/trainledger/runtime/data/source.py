"""What feeds a rank: its rows of each global batch, from a token file, in the order of the run."""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from trainledger.plans.ranks import Place
from trainledger.runtime.batch import Batch
from trainledger.runtime.data.order import Order
from trainledger.runtime.data.token_file import TokenFile
from trainledger.runtime.spec import RunSpec


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run has read: so many sequences, before its optimizer step `step`.

    It names no rank and no batch, so a run goes on from it in another layout, on other ranks and with another batch.
    """

    step: int = 0
    sequences: int = 0


class Tokens:
    """A Source (runtime/batch.py) of the tokens of a file.

    The sequences of a run are numbered through, epoch after epoch. A step takes the next gbs of them, each replica gbs
    over replicas in a row and each micro-batch mbs of these, so that a layout decides who reads a sequence and never
    which ones a step reads.
    """

    def __init__(self, file: TokenFile, spec: RunSpec, place: Place, start: Position | None = None) -> None:
        plan = spec.plan
        replica = place.dp_replicate * plan["dp_shard"] + place.dp_shard
        self._seq, self._mbs = spec.seq, plan["mbs"]
        self._own = self._mbs * plan["num_microbatches"]
        self._offset = replica * self._own
        self._all = spec.sequences_per_step
        self._order = Order(sequences=file.sequences(spec.seq), seed=spec.seed)
        self._tokens = file.tokens()
        self._start = start or Position()

    def __call__(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step, num_microbatches of [mbs, seq]."""
        read = self._start.sequences + (step - self._start.step) * self._all
        numbers = self._order.at(read + self._offset, self._own)
        rows = torch.from_numpy(self._rows(numbers))
        return list(zip(rows[:, :-1].split(self._mbs), rows[:, 1:].split(self._mbs), strict=True))

    def _rows(
        self, numbers: np.ndarray[tuple[int], np.dtype[np.int64]]
    ) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """Tokens [numbers, seq + 1] of sequences, the last of each being a label only."""
        index = numbers[:, None] * self._seq + np.arange(self._seq + 1)
        return self._tokens[index].astype(np.int64)
