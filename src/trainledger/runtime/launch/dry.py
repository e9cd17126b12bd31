"""Dry runs of some ranks of a world, one after the other, in one process that is not this one."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trainledger.runtime.launch.fork import run_forked
from trainledger.runtime.launch.rank import report
from trainledger.runtime.observe.observation import Observation
from trainledger.runtime.progress import Progress
from trainledger.runtime.spec import RunSpec


def run_dry(
    spec: RunSpec, ranks: Sequence[int], *, timeout_s: float = 600.0, progress: Progress | None = None
) -> list[Observation]:
    """What each of `ranks` would see of a run of `spec`, whatever the size of its world."""
    told = msgspec.json.encode(spec)
    (seen,) = run_forked(1, _observed, told, tuple(ranks), timeout_s=timeout_s, progress=progress)
    return seen


def _observed(_rank: int, told: bytes, ranks: tuple[int, ...]) -> list[Observation]:
    """In the forked process, whose own group gives way to the fake ones."""
    import torch.distributed as dist

    from trainledger.runtime.dry import dry_run

    spec = msgspec.json.decode(told, type=RunSpec)
    dist.destroy_process_group()
    seen: list[Observation] = []
    for number, rank in enumerate(ranks):

        def heard(done: int, total: int, text: str, *, number: int = number, rank: int = rank) -> None:
            report(number * total + done, len(ranks) * total, f"rank {rank}, {text}")

        seen.append(dry_run(spec, rank, heard))
    return seen
