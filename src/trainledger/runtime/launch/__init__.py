"""How the ranks of a run are started and watched: forked on this machine, or by torchrun."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainledger.runtime.observe.observation import Observation
    from trainledger.runtime.progress import Progress
    from trainledger.runtime.spec import RunSpec


def run_local(
    spec: RunSpec,
    *,
    timeout_s: float = 600.0,
    rank_bytes: int | None = None,
    available_bytes: int | None = None,
    progress: Progress | None = None,
) -> list[Observation]:
    """Run `spec` on forked ranks of this machine's CPU; what each rank saw, in rank order.

    `rank_bytes` is what one rank is expected to hold; with it a run that cannot fit into memory is refused.
    """
    import msgspec

    from trainledger.plans.ranks import world_size
    from trainledger.runtime.launch.fork import run_forked
    from trainledger.runtime.launch.memory import check_host_memory

    ranks = world_size(spec.plan)
    if rank_bytes is not None:
        check_host_memory(ranks, rank_bytes, available_bytes)
    return run_forked(ranks, _observed, msgspec.json.encode(spec), timeout_s=timeout_s, progress=progress)


def _observed(rank: int, spec: bytes) -> Observation:
    """What one forked rank does."""
    del rank
    import msgspec

    from trainledger.runtime.launch.rank import report
    from trainledger.runtime.main import observed
    from trainledger.runtime.spec import RunSpec

    return observed(msgspec.json.decode(spec, type=RunSpec), report)
