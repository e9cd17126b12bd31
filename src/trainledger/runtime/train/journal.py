"""The run folder as one process keeps it: what the ranks were told, and a line of metrics a step. No torch here."""

from __future__ import annotations

from pathlib import Path

import msgspec

from trainledger.runtime.files import write_whole
from trainledger.runtime.train.metrics import Line, Metrics, cut_after, set_aside
from trainledger.runtime.train.spec import METRICS, TOLD, TrainSpec


class Journal:
    """Written by one rank, and by no other.

    step   that the run goes on after: lines of later ones are of a run that did not get as far as a checkpoint
    """

    def __init__(self, spec: TrainSpec, step: int, *, writes: bool) -> None:
        self._metrics: Metrics | None = None
        if not writes:
            return
        folder = Path(spec.out)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / TOLD, msgspec.json.format(msgspec.json.encode(spec), indent=1))
        if step:
            cut_after(folder / METRICS, step)
        else:
            set_aside(folder / METRICS)
        self._metrics = Metrics(folder / METRICS)

    def write(self, line: Line) -> None:
        """Add a line."""
        if self._metrics is not None:
            self._metrics.write(line)

    def close(self) -> None:
        """All of it is on disk."""
        if self._metrics is not None:
            self._metrics.close()
