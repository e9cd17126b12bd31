"""When a run ends before its last step: because it is asked to, or because its numbers are of no use. No torch here."""

from __future__ import annotations

import math
import signal
import statistics
import threading
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from trainledger.errors import TrainledgerError


class Diverged(TrainledgerError):
    """The numbers of a run are of no use any more; what was saved before is as it was."""


class StopRequest:
    """Whether somebody wants the run to save and end: by SIGTERM to this process, or by a file in the run folder.

    The file is how the process that started the ranks tells them, on whichever machine they are; a person may make one
    too. Only the rank that `looks` reads it.
    """

    def __init__(self, file: Path, *, looks: bool) -> None:
        self._file = file if looks else None
        self._told = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._told = True

    def asked(self) -> bool:
        """Here; all ranks must agree on it before they act."""
        return self._told or (self._file is not None and self._file.exists())


class Asking:
    """What has asked the process that started the ranks to end: the number of a signal, or None."""

    def __init__(self) -> None:
        self.signal: int | None = None


@contextmanager
def asking(file: Path) -> Generator[Asking]:
    """Let SIGTERM and Ctrl-C make the file that ends a run, once each; the next Ctrl-C ends this process as ever.

    A file from before is removed. Off the main thread, where no signal arrives, nothing is listened to.
    """
    file.unlink(missing_ok=True)
    heard = Asking()

    def hear(number: int, frame: FrameType | None) -> None:
        del frame
        heard.signal = number
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        for each in before:
            signal.signal(each, before[each])

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {each: signal.signal(each, hear) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield heard
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        file.unlink(missing_ok=True)


class Spikes:
    """Tells a loss that leaves the range of those before it.

    factor   of the median of the last `window` losses, above which one is a spike; 0: none is

    >>> spikes = Spikes(2.0, 3, [4.0, 5.0, 6.0])
    >>> spikes.judge(9.9), spikes.judge(10.1)
    ('', 'the loss is 10.1, more than 2 times 5, the median of the 3 steps before')
    """

    def __init__(self, factor: float, window: int, before: Iterable[float] = ()) -> None:
        self._factor = factor
        self.losses: deque[float] = deque(before, maxlen=window)

    def judge(self, loss: float) -> str:
        """What is wrong with the next loss, or ""."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        full = len(self.losses) == self.losses.maxlen
        if self._factor and full and loss > self._factor * (median := statistics.median(self.losses)):
            window = len(self.losses)
            return (
                f"the loss is {loss:.6g}, more than {self._factor:g} times {median:.6g}, the median of the {window} "
                "steps before"
            )
        return ""
