"""What forked ranks do in the tests of launching; apart from them, so that a rank need not import pytest."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from trainledger.runtime.launch.fork import report
from trainledger.runtime.main import agree

_sent: list[object] = []
"""Keeps what a rank sends until the rank ends."""


def total(rank: int, offset: int) -> tuple[int, float, int]:
    """The sum of all ranks' numbers, which takes every one of them."""
    import torch
    import torch.distributed as dist

    value = torch.tensor(float(rank + offset))
    dist.all_reduce(value)
    return rank, float(value), torch.get_num_threads()


def environment(rank: int) -> list[str | None]:
    del rank
    return [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")]


def progressing(rank: int) -> None:
    for done in range(3):
        report(done + 1, 3, f"step {done} of rank {rank}")


def stuck_unless(rank: int, speaker: int, how: str) -> None:
    """Every rank waits in a collective for `speaker`, which ends in another way."""
    if rank == speaker:
        _end(how)
    total(rank, 0)


def collectives(rank: int, folder: str) -> None:
    """One collective after the other, without end; says who it is first."""
    import torch
    import torch.distributed as dist

    (Path(folder) / f"{rank}").write_text(str(os.getpid()))
    report(0, 1, "running")
    value = torch.ones(1 << 16)
    while True:
        dist.all_reduce(value)


def disagreeing(rank: int, digests: tuple[str, ...]) -> None:
    agree(digests[rank])


def unpicklable(rank: int) -> object:
    return lambda: rank


def late_receiver(rank: int) -> float:
    """Rank 0 is done while its message is still on its way: gloo sends it when the receiver asks."""
    import torch
    import torch.distributed as dist

    value = torch.tensor(float(5 - 5 * rank))
    if rank == 0:
        _sent.append(dist.isend(value, 1))
    else:
        time.sleep(0.5)
        dist.recv(value, 0)
    return float(value)


def _end(how: str) -> None:
    if how == "raise":
        raise ValueError("planted")
    if how == "exit":
        sys.stderr.write("the last words\n")
        os._exit(7)
    if how == "leave":
        raise SystemExit(0)
    if how == "abort":
        os.abort()
    time.sleep(1000)


def marked_processes(mark: str) -> list[int]:
    """Processes that were started with `mark` in their environment and have not ended."""
    found: list[int] = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and mark.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def say(done: int, total: int, text: str) -> None:
    """Progress, one line each time."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    # A parent to be killed: a world that works until it is ended.
    from trainledger.runtime.launch.fork import run_forked

    run_forked(3, collectives, sys.argv[1], timeout_s=50, progress=say)
