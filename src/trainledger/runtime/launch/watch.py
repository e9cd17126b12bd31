"""The parent's side of a world of ranks: hear them, notice the first that fails, end them all."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

from trainledger.errors import TrainledgerError
from trainledger.runtime.launch.rank import STACK_SIGNAL, Failure, Progress, Seat

SETTLE_S = 0.3
"""An exception may be the echo of another rank's death, whose notice is on its way for this long."""

STACK_S = 0.3
"""Time to write down a stack."""

GRACE_S = 0.5
"""Between SIGTERM and SIGKILL."""

LEAVE_S = 10.0
"""Time to leave the process group and exit, after all results are in."""

TAIL_LINES = 20
"""How much of a traceback or log is shown."""


class RankFailed(TrainledgerError):
    """A rank raised, died or did not end in time; all ranks have been ended.

    rank     the one that failed first
    status   its exit status, minus the signal that killed it, or None where it was still running
    """

    def __init__(self, rank: int, status: int | None, message: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.status = status


class Member:
    """One rank as its parent sees it."""

    def __init__(self, seat: Seat, process: ForkServerProcess, pipe: Connection[Any, Any]) -> None:
        self.seat = seat
        self.process = process
        self.pipe = pipe
        self.result: Any = None
        self.finished = False
        self.failure: Failure | None = None
        self.open = True

    @property
    def exitcode(self) -> int | None:
        """Exit status, minus the signal that killed it, or None while it runs."""
        return self.process.exitcode

    @property
    def died(self) -> bool:
        """It is gone without a word."""
        return self.exitcode is not None and not self.finished and self.failure is None

    def hear(self, progress: Progress | None) -> None:
        """Take in all that has been sent."""
        try:
            while self.open and self.pipe.poll():
                kind, content = self.pipe.recv()
                if kind == "progress":
                    if progress is not None:
                        progress(*content)
                elif kind == "result":
                    self.result, self.finished = content, True
                else:
                    self.failure = content
        except (EOFError, OSError):
            self.open = False

    def tail(self) -> str:
        """The last lines of its log."""
        try:
            text = self.seat.log.read_text(errors="replace")
        except FileNotFoundError:
            return ""
        return _last_lines(text)


def gather(members: Sequence[Member], timeout_s: float, progress: Progress | None) -> list[Any]:
    """What each rank returned, in rank order; RankFailed as soon as one fails or the time is over."""
    deadline = time.monotonic() + timeout_s
    while not all(member.finished for member in members):
        left = deadline - time.monotonic()
        if left <= 0:
            raise _too_long(members, timeout_s)
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
        if member.exitcode != 0:
            raise RankFailed(member.seat.rank, member.exitcode, _described(member, members, "after its result "))


def end(members: Sequence[Member]) -> None:
    """Leave no rank running: ask, then kill."""
    for member in members:
        with suppress(OSError, AttributeError):
            member.process.terminate()
    deadline = time.monotonic() + GRACE_S
    for member in members:
        member.process.join(max(0.0, deadline - time.monotonic()))
    for member in members:
        if member.exitcode is None:
            member.process.kill()
            member.process.join()
        member.pipe.close()


def _listen(members: Sequence[Member], timeout_s: float, progress: Progress | None) -> None:
    """Wait for a message or a death."""
    pipes = [member.pipe for member in members if member.open and not member.finished]
    wait([*pipes, *(member.process.sentinel for member in members)], timeout_s)
    for member in members:
        member.hear(progress)
        if member.exitcode is not None:
            # What it sent before its end may have come between the two looks.
            member.hear(progress)


def _settle(members: Sequence[Member]) -> None:
    deadline = time.monotonic() + SETTLE_S
    while not any(member.died for member in members) and (left := deadline - time.monotonic()) > 0:
        wait([member.process.sentinel for member in members], left)
        for member in members:
            member.hear(None)


def _first_failure(members: Sequence[Member]) -> RankFailed:
    """Of a rank that died silently, else of the one that raised first."""
    died = [member for member in members if member.died]
    raised = sorted((member.failure.at_s, member.seat.rank) for member in members if member.failure)
    culprit = died[0] if died else members[raised[0][1]]
    return RankFailed(culprit.seat.rank, culprit.exitcode, _described(culprit, members, ""))


def _described(member: Member, members: Sequence[Member], when: str) -> str:
    """One message: which rank, how, and the last it said."""
    who = f"rank {member.seat.rank} of {len(members)}"
    if member.failure is not None:
        return f"{who} raised {member.failure.headline}\n{_last_lines(member.failure.trace)}"
    code = member.exitcode
    if code is None:
        how = f"did not exit within {LEAVE_S:g} s"
    elif code < 0:
        how = f"was killed by {_signal_name(-code)}"
    else:
        how = f"exited with status {code} and no result"
    advice = " (the kernel does that when memory runs out: fewer ranks or smaller shapes)" if code == -9 else ""
    tail = member.tail()
    return f"{who} {when}{how}{advice}" + (f"; the last it wrote:\n{tail}" if tail else "")


def _too_long(members: Sequence[Member], timeout_s: float) -> RankFailed:
    """The time is over: ask those that have not finished where they are."""
    late = [member for member in members if not member.finished]
    for member in late:
        if member.process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(member.process.pid, STACK_SIGNAL)
    time.sleep(STACK_S)
    ranks = ", ".join(str(member.seat.rank) for member in late)
    first = late[0]
    return RankFailed(
        first.seat.rank,
        first.exitcode,
        f"rank {ranks} of {len(members)} did not end within {timeout_s:g} s (timeout_s); "
        f"rank {first.seat.rank} is here:\n{first.tail()}",
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_lines(text: str) -> str:
    return "\n".join("    " + line for line in text.rstrip().splitlines()[-TAIL_LINES:])
