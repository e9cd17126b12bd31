"""What is alive on one rank as its step goes on, and the most that ever was."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager


class Tally:
    """Bytes alive now; every change says what it is for, and the largest sum remembers where it was.

    >>> tally = Tally(10)
    >>> with tally.during("copy", 5):
    ...     tally.add("kept", 1)
    >>> tally.now, tally.most, tally.where
    (11, 16, 'kept')
    """

    def __init__(self, rest: int) -> None:
        self.now = self.most = rest
        self.where = "between steps"

    def add(self, what: str, nbytes: int) -> None:
        """So many bytes more."""
        self.now += nbytes
        self.reach(what, 0)

    def drop(self, nbytes: int) -> None:
        """So many bytes less."""
        self.now -= nbytes

    def reach(self, what: str, nbytes: int) -> None:
        """So many bytes more for an instant."""
        if self.now + nbytes > self.most:
            self.most, self.where = self.now + nbytes, what

    @contextmanager
    def during(self, what: str, nbytes: int) -> Generator[None]:
        """So many bytes more while something is done."""
        self.add(what, nbytes)
        yield
        self.drop(nbytes)
