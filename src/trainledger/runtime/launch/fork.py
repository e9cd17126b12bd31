"""Ranks forked from a clean server that has torch in memory: a world on this machine in a fraction of a second.

The server is the standard library's (multiprocessing, start method "forkserver"): a process of its own, without
threads, that imports torch once and forks whenever a rank is asked for. It ends with the last process that can ask.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import sys
import tempfile
import types
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Pipe
from multiprocessing.util import get_temp_dir
from typing import TypeVar, TypeVarTuple

from trainledger.errors import BadInput
from trainledger.runtime.launch.failure import RankFailed
from trainledger.runtime.launch.rank import Seat, report, serve
from trainledger.runtime.launch.watch import Member, dismiss, end, gather
from trainledger.runtime.progress import Progress

__all__ = ["RankFailed", "report", "run_forked"]

TOO_LONG = "AF_UNIX path too long"
"""What Python says of a socket whose path is longer than the kernel takes."""

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


def run_forked(
    world_size: int,
    target: Callable[[int, *Arguments], Result],
    *args: *Arguments,
    timeout_s: float = 60.0,
    threads: int = 1,
    progress: Progress | None = None,
    show: bool = False,
) -> list[Result]:
    """What `target(rank, *args)` returns on every rank, in rank order.

    The target is a function of a module, called in a process of its own whose default process group (gloo) is made.
    The first rank that raises or dies ends all others and is named in RankFailed, as does the end of `timeout_s`,
    counted from when all ranks are there. `progress` hears what rank 0 says with `report`. With `show` the ranks write
    where this process writes; otherwise what they write is kept for the error message.
    """
    job = pickle.dumps((target, args))
    with tempfile.TemporaryDirectory(prefix="trainledger-", ignore_cleanup_errors=True) as folder:
        members: list[Member] = []
        try:
            for rank in range(world_size):
                seat = Seat(
                    rank=rank,
                    world=world_size,
                    folder=folder,
                    server=get_temp_dir(),
                    threads=threads,
                    group_s=2 * timeout_s + 60,
                    show=show,
                )
                members.append(_start(seat, job, in_main=target.__module__ == "__main__"))
            results = gather(members, timeout_s, progress)
            dismiss(members)
        finally:
            end(members)
    return results


def _start(seat: Seat, job: bytes, *, in_main: bool) -> Member:
    """Fork one rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trainledger.runtime.launch.preload"])
    ours, theirs = Pipe()
    process = context.Process(target=serve, args=(theirs, seat, job), name=f"rank-{seat.rank}", daemon=True)
    try:
        with nullcontext() if in_main else _without_main():
            with _deaf_to_interrupts():
                forkserver.ensure_running()
            process.start()
    except (EOFError, ConnectionError) as error:
        raise RankFailed(
            seat.rank,
            None,
            f"rank {seat.rank} of {seat.world} was not started: the process that forks ranks ended, as when it is "
            "killed or memory runs out; run it again, with fewer ranks where memory is short",
        ) from error
    except OSError as error:
        if TOO_LONG not in str(error):
            raise
        raise BadInput(
            f"ranks are forked over a socket in the temporary folder, and the path of {get_temp_dir()} is too long for "
            "one; set TMPDIR to a folder with a shorter one"
        ) from error
    theirs.close()
    return Member(seat, process, ours)  # pyright: ignore[reportArgumentType]  # the type of another platform


@contextmanager
def _deaf_to_interrupts() -> Generator[None]:
    """What is started within does not hear Ctrl-C, which a terminal sends to all: only this process acts on it.

    The server ignores it once it serves, but not in the seconds in which it imports torch.
    """
    # the standard library starts its tracker with the server, and unblocks what it had blocked for that
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _without_main() -> Generator[None]:
    """Hide the main module from multiprocessing, which would run it again in every rank.

    A user's script that calls this package at its top level would call it again there, without end.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
