"""Ranks started by torchrun, on this machine and on others: what a user runs, with a GPU or without."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

from trainledger.errors import TrainledgerError
from trainledger.plans.ranks import world_size
from trainledger.runtime.launch.cluster import Cluster, check_port, port_in_use, read_cluster
from trainledger.runtime.launch.devices import check_devices, cuda_devices
from trainledger.runtime.launch.environment import QUIET
from trainledger.runtime.launch.failure import Failure, RankFailed, died, last_lines, raised, stack_in
from trainledger.runtime.launch.memory import check_host_memory
from trainledger.runtime.observe.observation import Observation
from trainledger.runtime.progress import Progress
from trainledger.runtime.spec import RunSpec, Told

Seen = TypeVar("Seen")

LOOK_S = 0.1
"""How often torchrun and the ranks' progress are looked at; torchrun looks at its ranks as often."""

STACK_S = 1.0
"""This long before the end of the time, ranks write down where they are."""

GRACE_S = 5.0
"""Between SIGTERM and SIGKILL: torchrun ends its ranks first."""

_FAILED = re.compile(r"rank +: (\d+) \(local_rank: (\d+)\)\s+exitcode +: (-?\d+)")
"""An entry of the table that torchrun ends with. [torch/distributed/elastic/multiprocessing/errors/__init__.py]"""

_IN_USE = re.compile(r"port: (\d+)[^\n]*(?:EADDRINUSE|address already in use)")
"""How torch's store says it. [torch/csrc/distributed/c10d/socket.cpp]"""


class Job(NamedTuple, Generic[Seen]):
    """A program of runtime/main.py by its name there, what its ranks are told, and the type of what each gives back."""

    name: str
    told: Told
    seen: type[Seen]


def run_torchrun(
    spec: RunSpec,
    cluster_args: Sequence[str] = (),
    *,
    timeout_s: float = 600.0,
    rank_bytes: int | None = None,
    available_bytes: int | None = None,
    progress: Progress | None = None,
) -> list[Observation]:
    """Run `spec` under torchrun, observed; what every rank of all nodes saw, in rank order."""
    return run_job(
        Job("prove", spec, Observation),
        world_size(spec.plan),
        cluster_args,
        timeout_s=timeout_s,
        rank_bytes=rank_bytes,
        available_bytes=available_bytes,
        progress=progress,
    )


def run_job(
    job: Job[Seen],
    ranks: int,
    cluster_args: Sequence[str],
    *,
    timeout_s: float,
    rank_bytes: int | None = None,
    available_bytes: int | None = None,
    progress: Progress | None = None,
) -> list[Seen]:
    """Run a job under torchrun on so many ranks; what every rank of all nodes gave back, in rank order.

    `cluster_args` are torchrun's flags for several nodes (see `cluster`). `rank_bytes` is what one rank is expected to
    hold in this machine's memory; with it a run that cannot fit is refused. The time includes torchrun's own start.
    """
    cluster = read_cluster(cluster_args, ranks)
    if rank_bytes is not None:
        check_host_memory(cluster.local, rank_bytes, available_bytes)
    check_devices(_run_of(job.told), cluster.local, cuda_devices())
    check_port(cluster)
    with tempfile.TemporaryDirectory(prefix="trainledger-", ignore_cleanup_errors=True) as folder:
        out = Path(folder)
        (out / "spec.json").write_bytes(msgspec.json.encode(job.told))
        # The ranks exit when this lock is let go, which the kernel does when this process dies.
        with (out / "alive").open("wb") as alive:
            fcntl.flock(alive, fcntl.LOCK_EX)
            deadline = time.monotonic() + timeout_s
            started = _start(job.name, out, cluster, deadline - STACK_S)
            try:
                status = _watch(started, deadline, out / "progress", progress)
                if status is None:
                    raise _too_long(out, cluster, timeout_s)
                if status:
                    raise _why(out, cluster, ranks, status)
                seen = [out / f"rank-{rank}.json" for rank in range(ranks)]
                return [msgspec.json.decode(file.read_bytes(), type=job.seen) for file in seen]
            finally:
                fcntl.flock(alive, fcntl.LOCK_UN)
                _end(started)


def _run_of(told: Told) -> RunSpec:
    """The run that a job is about."""
    run = told if isinstance(told, RunSpec) else getattr(told, "run", None)
    assert isinstance(run, RunSpec), f"{type(told).__name__} tells of a run"
    return run


def _start(job: str, out: Path, cluster: Cluster, stack_at: float) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", f"--log-dir={out / 'ranks'}", "--redirects=3"),
        *(*cluster.flags, "--max-restarts=0", f"--monitor-interval={LOOK_S}"),
        *("-m", "trainledger.runtime.main", "--spec", str(out / "spec.json"), "--out", str(out)),
        *("--job", job, "--stack-at", str(stack_at)),
    ]
    with (out / "log").open("wb") as log:
        return subprocess.Popen(  # noqa: S603  # our own interpreter, and flags that were checked
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **QUIET},
            # A terminal's Ctrl-C is for this process, which ends torchrun and the ranks in order.
            start_new_session=True,
        )


def _watch(started: subprocess.Popen[bytes], deadline: float, told: Path, progress: Progress | None) -> int | None:
    """The exit status of torchrun, or None at the end of the time; what rank 0 tells is passed on meanwhile."""
    heard = 0
    while time.monotonic() < deadline:
        with suppress(subprocess.TimeoutExpired):
            return started.wait(LOOK_S)
        if progress is None or not told.exists():
            continue
        with told.open("rb") as file:
            file.seek(heard)
            whole, newline, _ = file.read().rpartition(b"\n")
        heard += len(whole) + len(newline)
        for line in whole.splitlines():
            progress(*msgspec.json.decode(line, type=tuple[int, int, str]))
    return None


def _end(started: subprocess.Popen[bytes]) -> None:
    """Leave nothing running: the ranks go with the lock, and torchrun is asked, then killed."""
    started.terminate()
    try:
        started.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        started.kill()
        started.wait()


def _why(out: Path, cluster: Cluster, ranks: int, status: int) -> TrainledgerError:
    """What ended the run: a silent death before an exception, for that may be its echo; then the earliest."""
    log = (out / "log").read_text(errors="replace")
    if found := _IN_USE.search(log):
        return port_in_use(found[1], cluster.knob)
    table = [(int(rank), int(local), int(code)) for rank, local, code in _FAILED.findall(log)]
    spoke = {
        int(file.stem.removeprefix("failed-")): msgspec.json.decode(file.read_bytes(), type=Failure)
        for file in out.glob("failed-*.json")
    }
    # torchrun itself ends the ranks that are left with SIGTERM.
    silent = [entry for entry in table if entry[2] != -signal.SIGTERM and entry[0] not in spoke]
    if silent:
        rank, local, code = min(silent, key=lambda entry: entry[2])
        return died(rank, ranks, code, _rank_log(out, cluster, local))
    if spoke:
        rank = min(spoke, key=lambda rank: spoke[rank].at_s)
        return raised(rank, ranks, next((code for failed, _, code in table if failed == rank), None), spoke[rank])
    return TrainledgerError(f"torchrun exited with status {status}; the last it wrote:\n{last_lines(log)}")


def _too_long(out: Path, cluster: Cluster, timeout_s: float) -> RankFailed:
    """The time is over; where the ranks of this node were just before."""
    where = "\n".join(
        f"  local rank {local} is here:\n{stack_in(_rank_log(out, cluster, local))}" for local in range(cluster.local)
    )
    return RankFailed(0, None, f"the ranks of this node did not end within {timeout_s:g} s; raise --timeout\n{where}")


def _rank_log(out: Path, cluster: Cluster, local: int) -> str:
    """What a rank of this node wrote to stderr, in the folders that torchrun made."""
    folder = cluster.log_dir or out / "ranks"
    files = sorted(folder.glob(f"*/attempt_0/{local}/stderr.log"), key=lambda file: file.stat().st_mtime)
    return files[-1].read_text(errors="replace") if files else ""
