"""Start the ranks of a run: forked here, by torchrun, or none at all in a dry run. torch is not imported here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from trainledger.runtime.observe.observation import Observation
from trainledger.runtime.progress import Progress
from trainledger.runtime.spec import RunSpec

FORKED_BYTES = 128 << 20
"""What a forked rank takes of the machine before it holds anything of a plan: assumed, and above the 80 MiB that were
its share (Pss of /proc/self/smaps_rollup) with torch 2.13.0 on CPU."""
STARTED_BYTES = 512 << 20
"""The same of a rank that imports torch for itself: assumed, and above the 280 MiB that were resident (Rss)."""


class How(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how long.

    dry           fake tensors, and the ranks one after the other in one process
    ranks         those that a dry run tries: one of each that should do the same
    cluster_args  torchrun's; None: ranks are forked here
    rank_bytes    what a rank will hold of the plan
    """

    dry: bool
    ranks: tuple[int, ...]
    cluster_args: tuple[str, ...] | None
    timeout_s: int
    rank_bytes: int


def how_to_run(
    ranks: tuple[int, ...], held_bytes: int, words: tuple[str, ...] | None, timeout_s: int, *, dry: bool = False
) -> How:
    """How to run ranks that hold so much of a plan each: forked, or with torchrun's words where there are any."""
    each = FORKED_BYTES if words is None else STARTED_BYTES
    return How(dry=dry, ranks=ranks, cluster_args=words, timeout_s=timeout_s, rank_bytes=each + held_bytes)


class Runner(Protocol):
    """Runs a spec on all ranks and gives back what each saw, in rank order."""

    def __call__(self, spec: RunSpec, how: How, progress: Progress | None) -> Sequence[Observation]:
        """Run it."""
        ...


def launch(spec: RunSpec, how: How, progress: Progress | None) -> Sequence[Observation]:
    """Run a spec with this package's own runtime."""
    if how.dry:
        from trainledger.runtime.launch.dry import run_dry

        return run_dry(spec, how.ranks, timeout_s=how.timeout_s, progress=progress)
    if how.cluster_args is not None:
        from trainledger.runtime.launch.torchrun import run_torchrun

        return run_torchrun(
            spec, how.cluster_args, timeout_s=how.timeout_s, rank_bytes=how.rank_bytes, progress=progress
        )
    from trainledger.runtime.launch import run_local

    return run_local(spec, timeout_s=how.timeout_s, rank_bytes=how.rank_bytes, progress=progress)
