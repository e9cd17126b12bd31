"""The parent's side of a world of forked ranks: hear them, notice the first that fails, end them all."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

from trainledger.runtime.launch.failure import Failure, RankFailed, died, raised, stack_in
from trainledger.runtime.launch.rank import STACK_SIGNAL, Seat
from trainledger.runtime.progress import Progress

SETTLE_S = 0.5
"""An exception may be the echo of another rank's death, whose notice is on its way for this long."""

STACK_S = 0.3
"""Time to write down a stack."""

GRACE_S = 0.5
"""Between SIGTERM and SIGKILL."""

LOST = 255
"""What the standard library says of a process whose server ended first; the process itself may be running."""

LEAVE_S = 10.0
"""Time to leave the process group and exit, after all results are in."""


class Member:
    """One rank as its parent sees it."""

    def __init__(self, seat: Seat, process: ForkServerProcess, pipe: Connection[Any, Any]) -> None:
        self.seat = seat
        self.process = process
        self.pipe = pipe
        self.result: Any = None
        self.finished = False
        self.failure: Failure | None = None
        self._open = True

    @property
    def exitcode(self) -> int | None:
        """Exit status, minus the signal that killed it, or None while it runs."""
        return self.process.exitcode

    @property
    def died(self) -> bool:
        """It is gone without a word; ask once all it sent has been heard."""
        return self.exitcode is not None and not self.finished and self.failure is None

    @property
    def events(self) -> list[Connection[Any, Any] | int]:
        """What becomes ready when there is something to hear, or when it dies."""
        return [self.pipe, self.process.sentinel] if self._open else [self.process.sentinel]

    def hear(self, progress: Progress | None) -> None:
        """Take in all that has been sent."""
        try:
            while self._open and self.pipe.poll():
                kind, content = self.pipe.recv()
                if kind == "progress":
                    if progress is not None:
                        progress(*content)
                elif kind == "result":
                    self.result, self.finished = content, True
                else:
                    self.failure = content
        except (EOFError, OSError):
            self._open = False

    def log(self) -> str:
        """What it wrote so far."""
        return self.seat.log.read_text(errors="replace") if self.seat.log.exists() else ""

    def error(self) -> RankFailed:
        """Why it failed; only for one that has."""
        rank, world, status = self.seat.rank, self.seat.world, self.exitcode
        if self.failure is not None:
            return raised(rank, world, status, self.failure)
        assert status is not None, f"rank {rank} runs and has not failed"
        if status == LOST:
            why = "the process that forks ranks ended, as when it is killed or memory runs out"
            return RankFailed(
                rank, status, f"rank {rank} of {world} was lost: {why}; run it again, with fewer ranks then"
            )
        return died(rank, world, status, self.log())


def gather(members: Sequence[Member], timeout_s: float, progress: Progress | None) -> list[Any]:
    """What each rank returned, in rank order; RankFailed as soon as one fails or the time is over."""
    deadline = time.monotonic() + timeout_s
    while not all(member.finished for member in members):
        left = deadline - time.monotonic()
        if left <= 0:
            late = [member for member in members if not member.finished]
            raise _too_long(late, f"end within {timeout_s:g} s; raise --timeout")
        _listen(members, left, progress)
        if any(member.failure or member.died for member in members):
            _settle(members)
            raise _first_failure(members)
    return [member.result for member in members]


def dismiss(members: Sequence[Member]) -> None:
    """Let the ranks go, all of which have finished, and wait until they have."""
    for member in members:
        with suppress(OSError):
            member.pipe.send("go")
    deadline = time.monotonic() + LEAVE_S
    for member in members:
        member.process.join(max(0.0, deadline - time.monotonic()))
    for member in members:
        if member.exitcode is None:
            raise _too_long([member], f"leave within {LEAVE_S:g} s of the end of the run")
        if member.exitcode:
            raise died(member.seat.rank, member.seat.world, member.exitcode, member.log())


def end(members: Sequence[Member]) -> None:
    """Leave no rank running: ask, then kill."""
    for member in members:
        member.process.terminate()
    deadline = time.monotonic() + GRACE_S
    for member in members:
        member.process.join(max(0.0, deadline - time.monotonic()))
    for member in members:
        if member.exitcode is None:
            member.process.kill()
            member.process.join()
        elif member.exitcode == LOST and member.process.pid is not None:
            # once its pipe is closed it would remove the server's folder, which this process removes itself
            with suppress(ProcessLookupError):
                os.kill(member.process.pid, signal.SIGKILL)
        member.pipe.close()


def _listen(members: Sequence[Member], timeout_s: float, progress: Progress | None) -> None:
    """Wait for a message or a death. A rank that has finished stays, so that its end is a failure too."""
    wait([event for member in members for event in member.events], timeout_s)
    for member in members:
        member.hear(progress)
        if member.exitcode is not None:
            # What it sent before its end may have come between the two looks.
            member.hear(progress)
            if member.finished:
                raise died(member.seat.rank, member.seat.world, member.exitcode, member.log())


def _settle(members: Sequence[Member]) -> None:
    """Give a silent death the time to be noticed."""
    deadline = time.monotonic() + SETTLE_S
    while not any(member.died for member in members) and (left := deadline - time.monotonic()) > 0:
        wait([member.process.sentinel for member in members], left)
        for member in members:
            member.hear(None)


def _first_failure(members: Sequence[Member]) -> RankFailed:
    """Of a rank that died silently, else of the one that raised first."""
    silent = [member for member in members if member.died]
    if silent:
        return silent[0].error()
    spoke = [(member.failure.at_s, member.seat.rank) for member in members if member.failure]
    return members[min(spoke)[1]].error()


def _too_long(late: Sequence[Member], what: str) -> RankFailed:
    """The time is over: ask those that are late where they are. `what` they did not do, with its knob if it has one."""
    for member in late:
        if member.process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(member.process.pid, STACK_SIGNAL)
    time.sleep(STACK_S)
    where = "\n".join(f"  rank {member.seat.rank} is here:\n{stack_in(member.log())}" for member in late)
    ranks = ", ".join(str(member.seat.rank) for member in late)
    first = late[0]
    return RankFailed(
        first.seat.rank,
        first.exitcode,
        f"rank {ranks} of {first.seat.world} did not {what}\n{where}",
    )
