"""What a forked rank does: join the process group, run the target, hand over what it returned.

Its link to the parent is its lifeline too. The parent never closes it while the rank is wanted, so the end of it means
that the parent has died, and the rank exits at once, wherever it is.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import shutil
import signal
import sys
import threading
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from trainledger.runtime.launch.environment import QUIET, one_machine
from trainledger.runtime.launch.failure import failure_of

STACK_SIGNAL = signal.SIGUSR1
"""Makes a rank write into its log where it is; the handler is faulthandler's, so a blocked rank obeys as well."""

ORPHANED = 113
"""Exit status of a rank whose parent has gone."""


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank sits: its number, the folder it shares with the others, and how it runs.

    server    folder of the server's socket, which nobody else removes when the parent is killed
    group_s   the limit of one collective: above the parent's own, so that the parent is the one to speak
    show      its output goes where the server's goes, not into its log
    """

    rank: int
    world: int
    folder: str
    server: str
    threads: int
    group_s: float
    show: bool

    @property
    def log(self) -> Path:
        """What the rank writes to stdout and stderr."""
        return Path(self.folder) / f"rank-{self.rank}.log"


class Link:
    """The rank's end of the pipe to its parent."""

    def __init__(self, pipe: Connection[Any, Any], seat: Seat) -> None:
        self._pipe = pipe
        self._seat = seat
        self._sending = threading.Lock()
        self._dismissed = threading.Event()
        threading.Thread(target=self._listen, name="parent", daemon=True).start()

    def send(self, kind: str, content: object) -> None:
        """Hand something to the parent; a parent that is gone is noticed by the listening thread."""
        with self._sending:
            self._pipe.send((kind, content))

    def wait_for_dismissal(self) -> None:
        """Until the parent has heard from every rank: a rank that left sooner would cut off the others."""
        self._dismissed.wait()

    def _listen(self) -> None:
        try:
            self._pipe.recv()
        except (EOFError, OSError):
            for folder in (self._seat.folder, self._seat.server):
                shutil.rmtree(folder, ignore_errors=True)
            os._exit(ORPHANED)
        self._dismissed.set()


_link: Link | None = None


def report(done: int, total: int, text: str) -> None:
    """Tell the parent's progress callback; for use in a target. Every rank may call it, and rank 0 is heard."""
    if _link is not None:
        _link.send("progress", (done, total, text))


def serve(pipe: Connection[Any, Any], seat: Seat, job: bytes) -> None:
    """Main function of a rank; `job` is the pickled (target, arguments), opened where a failure can be told."""
    global _link  # noqa: PLW0603  # one rank, one link; a target is given its rank and its arguments only
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = Link(pipe, seat)
    _keep_output(seat)
    try:
        _join(seat)
        _link = link if seat.rank == 0 else None
        target, arguments = pickle.loads(job)  # noqa: S301  # written by the parent of this very process
        link.send("result", target(seat.rank, *arguments))
    except BaseException as error:  # noqa: BLE001  # whatever it is, the parent must hear of it
        link.send("failed", failure_of(error))
        # It stays until it is killed: leaving would break the collectives of the others, and hide the cause.
        threading.Event().wait()
    link.wait_for_dismissal()
    _leave()


def _keep_output(seat: Seat) -> None:
    """Send the rank's output, of Python and of C++, into its log."""
    try:
        log = os.open(seat.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except FileNotFoundError:
        # the parent ended before this rank was forked, and took the folder of the world with it
        os._exit(ORPHANED)
    faulthandler.register(STACK_SIGNAL, file=log, all_threads=False)
    if not seat.show:
        os.dup2(log, 1)
        os.dup2(log, 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a rank's streams are files


def _join(seat: Seat) -> None:
    """Make the default process group: gloo, met through a file, so that no port can be taken."""
    os.environ.update(
        {**QUIET, **one_machine()},
        RANK=str(seat.rank),
        LOCAL_RANK=str(seat.rank),
        WORLD_SIZE=str(seat.world),
        LOCAL_WORLD_SIZE=str(seat.world),
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(seat.threads)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{seat.folder}/store", seat.world),  # pyright: ignore[reportPrivateImportUsage]  # documented
        rank=seat.rank,
        world_size=seat.world,
        timeout=timedelta(seconds=seat.group_s),
    )


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
