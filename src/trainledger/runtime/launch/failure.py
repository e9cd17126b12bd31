"""What is told of a rank that failed, and how it is said."""

from __future__ import annotations

import signal
import time
import traceback

import msgspec

from trainledger.errors import TrainledgerError

TAIL_LINES = 20
"""How much of a traceback or log is shown."""

LINE_LENGTH = 400
"""How much of a line is shown: an error of DTensor lists every tensor of an optimizer step in one."""

STACK_LINES = 6
"""How much of the stack of a rank that did not end is shown: where it waits, and who called that."""

_WHY: dict[int, str] = {
    signal.SIGKILL: ", as the kernel does when memory runs out (then fewer ranks or smaller shapes help)",
    signal.SIGBUS: (
        ", as the kernel does where a file is cut short that is read in place, such as one of tokens, or where "
        "/dev/shm is full; leave the files of a run alone while it runs, or make room there"
    ),
}
"""What else is known of a death by a signal."""

_STACK = "(most recent call first):\n"


class RankFailed(TrainledgerError):
    """A rank raised, died or did not end in time; all ranks have been ended.

    rank     the one that failed first
    status   its exit status, minus the signal that killed it, or None where it was still running
    """

    many_lines = True

    def __init__(self, rank: int, status: int | None, message: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.status = status


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An exception that left a rank's work.

    at_s    when, on the clock that all processes of a machine share
    what    the exception in one line, or the whole message of one that is meant for users
    trace   the traceback; "" where the message was meant for users
    """

    at_s: float
    what: str
    trace: str


def failure_of(error: BaseException) -> Failure:
    """What is told of an exception, without the frame that caught it."""
    if isinstance(error, TrainledgerError):
        return Failure(at_s=time.monotonic(), what=str(error), trace="")
    inner = error.__traceback__ and error.__traceback__.tb_next
    return Failure(
        at_s=time.monotonic(),
        what=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
        trace="".join(traceback.format_exception(type(error), error, inner or error.__traceback__)),
    )


def raised(rank: int, world: int, status: int | None, failure: Failure) -> RankFailed:
    """The error for an exception in a rank."""
    how = f" raised {failure.what}\n{last_lines(failure.trace)}" if failure.trace else f": {failure.what}"
    return RankFailed(rank, status, f"rank {rank} of {world}{how}")


def died(rank: int, world: int, status: int, log: str) -> RankFailed:
    """The error for a rank that ended without a word; `log` is what it wrote."""
    how = (
        f"was killed by {_signal_name(-status)}" if status < 0 else f"exited with status {status} and without a result"
    )
    how += _WHY.get(-status, "")
    tail = f"; the last it wrote:\n{last_lines(log)}" if log.strip() else ""
    return RankFailed(rank, status, f"rank {rank} of {world} {how}{tail}")


def stack_in(log: str) -> str:
    r"""The innermost frames of the last stack that faulthandler wrote into a log.

    >>> print(stack_in("Stack (most recent call first):\n  File a\n  File b\n"))
          File a
          File b
    """
    _, found, stack = log.rpartition(_STACK)
    return _indented(stack.rstrip().splitlines()[:STACK_LINES]) if found else last_lines(log)


def last_lines(text: str) -> str:
    """The end of a text, indented."""
    return _indented(text.rstrip().splitlines()[-TAIL_LINES:])


def _indented(lines: list[str]) -> str:
    return "\n".join(f"    {line if len(line) <= LINE_LENGTH else f'{line[:LINE_LENGTH]}...'}" for line in lines)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
