"""What torchrun starts on every rank: `python -m trainledger.runtime.main --job NAME --spec FILE --out DIR`.

Every rank writes `rank-<n>.json`, what it saw, into DIR, and one rank of each machine writes those of all the others,
so that each machine has the whole. A rank that fails writes `failed-<n>.json`.
"""

from __future__ import annotations

import argparse
import faulthandler
import fcntl
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from trainledger.errors import BadInput
from trainledger.runtime.files import write_whole
from trainledger.runtime.launch.environment import one_machine
from trainledger.runtime.launch.failure import failure_of
from trainledger.runtime.launch.rank import ORPHANED
from trainledger.runtime.observe.observation import Observation
from trainledger.runtime.progress import Progress
from trainledger.runtime.spec import RunSpec, Told
from trainledger.runtime.timing.timed import Timed, Timing
from trainledger.runtime.train.result import Trained
from trainledger.runtime.train.spec import TrainSpec

ECHO_S = 1.0
"""A rank that raised stays this long: torchrun, which looks ten times a second, then sees another's death first."""


def main(argv: Sequence[str]) -> None:
    """One rank, from its arguments and the environment that torchrun made."""
    parser = argparse.ArgumentParser(prog="trainledger.runtime.main", allow_abbrev=False)
    parser.add_argument("--job", choices=JOBS, default="prove", help="the program")
    parser.add_argument("--spec", type=Path, required=True, help="what the ranks are told, as JSON")
    parser.add_argument("--out", type=Path, required=True, help="folder for what the ranks saw")
    parser.add_argument("--stack-at", type=float, help="on the machine's monotonic clock: write down where the rank is")
    arguments = parser.parse_args(argv)
    out: Path = arguments.out
    _follow(out / "alive")
    if arguments.stack_at is not None:
        faulthandler.dump_traceback_later(max(1.0, arguments.stack_at - time.monotonic()), exit=False)
    try:
        _run(JOBS[arguments.job], arguments.spec, out)
    except BaseException as error:
        write_whole(out / f"failed-{os.environ['RANK']}.json", msgspec.json.encode(failure_of(error)))
        time.sleep(ECHO_S)
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()


def observed(spec: RunSpec, progress: Progress) -> Observation:
    """Run `spec` on this rank, once all ranks have agreed that it is the same one."""
    # The programs are imported here because they import torch, and the parent of a run does not.
    from trainledger.runtime.run import run

    agree(spec.digest)
    return run(spec, progress)


def measured(timed: Timed, progress: Progress) -> Timing:
    """Put the steps of `timed` on the clock on this rank, once all ranks have agreed that it is the same run."""
    from trainledger.runtime.timing.measure import measure

    agree(timed.digest)
    return measure(timed, progress)


def trained(spec: TrainSpec, progress: Progress) -> Trained:
    """Train on this rank, once all ranks have agreed that it is the same run."""
    from trainledger.runtime.train.loop import train

    agree(spec.digest)
    return train(spec, progress)


class Program(NamedTuple):
    """What ranks are told, and what they do; what they give back has their `rank`."""

    told: type[Told]
    run: Callable[[Any, Progress], Any]


JOBS: dict[str, Program] = {
    "prove": Program(RunSpec, observed),
    "measure": Program(Timed, measured),
    "train": Program(TrainSpec, trained),
}
"""By name."""


def agree(digest: str) -> None:
    """Refuse to start where ranks were told different things; the most frequent digest is taken to be meant."""
    import torch.distributed as dist

    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    meant, _ = Counter(digests).most_common(1)[0]
    others = [rank for rank, seen in enumerate(digests) if seen != meant]
    if others:
        raise BadInput(
            f"rank {', '.join(map(str, others))} of {len(digests)} was told another run than the rest (digest "
            f"{digests[others[0]][:12]}, the rest {meant[:12]}): start every node with the same model, plan and flags, "
            "and the same release of trainledger"
        )


def _run(job: Program, spec_file: Path, out: Path) -> None:
    """Join, run, and write what was seen."""
    told = msgspec.json.decode(spec_file.read_bytes(), type=job.told)
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    _join(local)
    import torch.distributed as dist

    seen = job.run(told, _Progress(out / "progress") if rank == 0 else _unheard)
    every: list[Any] = [seen] * dist.get_world_size()
    dist.all_gather_object(every, seen)
    for other in every if local == 0 else [seen]:
        write_whole(out / f"rank-{other.rank}.json", msgspec.json.encode(other))
    # Nobody leaves while another may still wait for it.
    dist.barrier()
    dist.destroy_process_group()


def _join(local: int) -> None:
    """Make the default process group: NCCL where there is a CUDA device, one for each local rank, else gloo."""
    if os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"]:
        os.environ.update(one_machine())
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return
    if local >= torch.cuda.device_count():
        raise BadInput(
            f"local rank {local} has no CUDA device: {torch.cuda.device_count()} are visible here; start fewer ranks "
            "on this node (--nproc-per-node)"
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    # gloo beside it carries what is gathered as objects.
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)


def _follow(alive: Path) -> None:
    """Exit at once when the process that holds a lock on `alive` has gone, even inside a collective."""
    if not alive.exists():
        return
    lock = alive.open("rb")

    def wait() -> None:
        fcntl.flock(lock, fcntl.LOCK_SH)
        shutil.rmtree(alive.parent, ignore_errors=True)
        os._exit(ORPHANED)

    threading.Thread(target=wait, name="parent", daemon=True).start()


class _Progress:
    """Appends to the file that the parent reads."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, done: int, total: int, text: str) -> None:
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode((done, total, text)) + b"\n")


def _unheard(done: int, total: int, text: str) -> None:
    """Progress of a rank that nobody listens to."""


if __name__ == "__main__":
    from torch.distributed.elastic.multiprocessing.errors import record

    record(main)(sys.argv[1:])
