"""Wall time of the phases of a step, and the name of the phase that runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

OUTSIDE = "outside"
"""The phase of what happens in no phase: building the model, for one."""


class Clock:
    """Seconds by phase, of a monotonic clock.

    Phases nest: each is charged all of the time between its start and its end, and one within itself once. Several
    of one name add up, as the forwards of micro-batches do.

    synchronize   waits for the device, called where a measured phase starts and ends; None: there is none to wait for
    measured      whether time is charged; the name of the phase is known either way
    """

    def __init__(
        self, synchronize: Callable[[], None] | None = None, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self.seconds: dict[str, float] = {}
        self.measured = False
        self._synchronize = synchronize
        self._now = now
        self._open: list[str] = []
        self._paused_s = 0.0

    @property
    def current(self) -> str:
        """The innermost phase that runs."""
        return self._open[-1] if self._open else OUTSIDE

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Charge what happens within to `name`."""
        charged = self.measured and name not in self._open
        start = self._read() if charged else 0.0
        self._open.append(name)
        try:
            yield
        finally:
            self._open.pop()
            if charged:
                self.seconds[name] = self.seconds.get(name, 0.0) + self._read() - start

    @contextmanager
    def paused(self) -> Generator[None]:
        """Charge what happens within to no phase: the observer's own work."""
        start = self._read()
        try:
            yield
        finally:
            self._paused_s += self._read() - start

    def _read(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return self._now() - self._paused_s
