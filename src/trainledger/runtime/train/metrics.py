"""What a run writes of each step: one line of JSON, whole on disk before the next step begins. No torch here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from trainledger.runtime.files import write_whole


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """What casts to FP8 lost in one step, as shares of the elements of all operands, and where it was worst.

    worst   the layer and operand of which the largest share was saturated or flushed
    """

    saturated: float
    flushed: float
    worst: str
    worst_saturated: float
    worst_flushed: float


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One optimizer step.

    step            counted from 1
    loss            the mean over all tokens of the step, before it; null where it is not a finite number
    norm            of all gradients before they were clipped
    tokens          of the run so far
    step_s          from the first forward until all ranks had stepped, without evaluations and checkpoints
    memory_bytes    of the rank that held most: on CUDA the most that was allocated, else what is resident
    scale           what the loss was multiplied by
    skipped         the optimizer did not step, for a scaled gradient was not finite
    held_out        loss on held-out sequences after the step
    fp8             where casts were counted
    blocked_s       training waited so long for a checkpoint
    checkpoint      one was begun after this step
    said            what a reader should know of this step
    """

    step: int
    loss: float | None
    learning_rate: float
    tokens: int
    step_s: float
    tokens_per_s: float
    memory_bytes: int
    norm: float | None = None
    scale: float | None = None
    skipped: bool = False
    held_out: float | None = None
    fp8: Lost | None = None
    blocked_s: float = 0.0
    checkpoint: bool = False
    said: tuple[str, ...] = ()


class Metrics:
    """The file of a run, appended to by one process alone."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("ab", buffering=0)

    def write(self, line: Line) -> None:
        """Add a line by one call of the system, so that a process that dies leaves a whole line or none."""
        self._file.write(msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        """On disk when this returns."""
        os.fsync(self._file.fileno())
        self._file.close()


def lines_of(path: Path) -> Iterator[Line]:
    """The lines of a file as far as they are whole: what a full disk or a dead machine cut off is left out."""
    if not path.exists():
        return
    for raw in path.read_bytes().split(b"\n"):
        try:
            yield msgspec.json.decode(raw, type=Line)
        except msgspec.MsgspecError:
            return


def cut_after(path: Path, step: int) -> None:
    """Drop the lines of steps that are to be taken again, and a last one that is not whole."""
    if path.exists():
        kept = (msgspec.json.encode(line) + b"\n" for line in lines_of(path) if line.step <= step)
        write_whole(path, b"".join(kept))


def set_aside(path: Path) -> Path | None:
    """Give the file of a run that left no checkpoint another name, the first that is free; None where there is none."""
    if not path.exists():
        return None
    number = 1
    while (aside := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    return path.rename(aside)
