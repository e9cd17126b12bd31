"""How the ranks of a run are started and watched: forked on this machine, or by torchrun."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainledger.runtime.observe.observation import Observation
    from trainledger.runtime.progress import Progress
    from trainledger.runtime.spec import RunSpec
    from trainledger.runtime.timing.timed import Timed, Timing
    from trainledger.runtime.train.result import Trained
    from trainledger.runtime.train.spec import TrainSpec


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


def run_timed(
    timed: Timed,
    *,
    cluster_args: Sequence[str] | None,
    timeout_s: float,
    rank_bytes: int | None = None,
    progress: Progress | None = None,
) -> list[Timing]:
    """Put the steps of a run on the clock, on ranks that are forked here or started by torchrun with its arguments."""
    import msgspec

    from trainledger.plans.ranks import world_size
    from trainledger.runtime.launch.fork import run_forked
    from trainledger.runtime.launch.memory import check_host_memory
    from trainledger.runtime.launch.torchrun import Job, run_job
    from trainledger.runtime.timing.timed import Timing

    ranks = world_size(timed.run.plan)
    if cluster_args is not None:
        job = Job("measure", timed, Timing)
        return run_job(job, ranks, cluster_args, timeout_s=timeout_s, rank_bytes=rank_bytes, progress=progress)
    if rank_bytes is not None:
        check_host_memory(ranks, rank_bytes)
    return run_forked(ranks, _measured, msgspec.json.encode(timed), timeout_s=timeout_s, progress=progress)


def run_training(
    spec: TrainSpec,
    *,
    cluster_args: Sequence[str] | None,
    timeout_s: float,
    rank_bytes: int | None = None,
    progress: Progress | None = None,
) -> list[Trained]:
    """Train on ranks that are forked here or started by torchrun with its arguments; what each rank has to say."""
    import msgspec

    from trainledger.plans.ranks import world_size
    from trainledger.runtime.launch.fork import run_forked
    from trainledger.runtime.launch.memory import check_host_memory
    from trainledger.runtime.launch.torchrun import Job, run_job
    from trainledger.runtime.train.result import Trained

    ranks = world_size(spec.plan)
    if cluster_args is not None:
        job = Job("train", spec, Trained)
        return run_job(job, ranks, cluster_args, timeout_s=timeout_s, rank_bytes=rank_bytes, progress=progress)
    if rank_bytes is not None:
        check_host_memory(ranks, rank_bytes)
    return run_forked(ranks, _trained, msgspec.json.encode(spec), timeout_s=timeout_s, progress=progress)


def _trained(rank: int, spec: bytes) -> Trained:
    """What one forked rank does in training."""
    del rank
    import msgspec

    from trainledger.runtime.launch.rank import report
    from trainledger.runtime.main import trained
    from trainledger.runtime.train.spec import TrainSpec

    return trained(msgspec.json.decode(spec, type=TrainSpec), report)


def _measured(rank: int, timed: bytes) -> Timing:
    """What one forked rank does on the clock."""
    del rank
    import msgspec

    from trainledger.runtime.launch.rank import report
    from trainledger.runtime.main import measured
    from trainledger.runtime.timing.timed import Timed

    return measured(msgspec.json.decode(timed, type=Timed), report)


def _observed(rank: int, spec: bytes) -> Observation:
    """What one forked rank does."""
    del rank
    import msgspec

    from trainledger.runtime.launch.rank import report
    from trainledger.runtime.main import observed
    from trainledger.runtime.spec import RunSpec

    return observed(msgspec.json.decode(spec, type=RunSpec), report)
