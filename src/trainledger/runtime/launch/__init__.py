"""How the ranks of a run are started and watched: forked on this machine, or by torchrun."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainledger.runtime.launch.torchrun import Job
    from trainledger.runtime.observe.observation import Observation
    from trainledger.runtime.progress import Progress
    from trainledger.runtime.spec import RunSpec
    from trainledger.runtime.timing.timed import Timed, Timing
    from trainledger.runtime.train.result import Trained
    from trainledger.runtime.train.spec import TrainSpec

Seen = TypeVar("Seen")


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
    from trainledger.plans.ranks import world_size
    from trainledger.runtime.launch.torchrun import Job
    from trainledger.runtime.observe.observation import Observation

    job = Job("prove", spec, Observation)
    return _forked(job, world_size(spec.plan), timeout_s, rank_bytes, progress, available_bytes=available_bytes)


def run_timed(
    timed: Timed,
    *,
    cluster_args: Sequence[str] | None,
    timeout_s: float,
    rank_bytes: int | None = None,
    progress: Progress | None = None,
) -> list[Timing]:
    """Put the steps of a run on the clock, on ranks that are forked here or started by torchrun with its arguments."""
    from trainledger.plans.ranks import world_size
    from trainledger.runtime.launch.torchrun import Job, run_job
    from trainledger.runtime.timing.timed import Timing

    job, ranks = Job("measure", timed, Timing), world_size(timed.run.plan)
    if cluster_args is not None:
        return run_job(job, ranks, cluster_args, timeout_s=timeout_s, rank_bytes=rank_bytes, progress=progress)
    return _forked(job, ranks, timeout_s, rank_bytes, progress)


def run_training(
    spec: TrainSpec,
    *,
    cluster_args: Sequence[str] | None,
    timeout_s: float,
    rank_bytes: int | None = None,
    progress: Progress | None = None,
) -> list[Trained]:
    """Train on ranks that are forked here or started by torchrun with its arguments; what each rank has to say."""
    from trainledger.plans.ranks import world_size
    from trainledger.runtime.launch.torchrun import Job, run_job
    from trainledger.runtime.train.result import Trained

    job, ranks = Job("train", spec, Trained), world_size(spec.plan)
    if cluster_args is not None:
        return run_job(job, ranks, cluster_args, timeout_s=timeout_s, rank_bytes=rank_bytes, progress=progress)
    return _forked(job, ranks, timeout_s, rank_bytes, progress)


def _forked(
    job: Job[Seen],
    ranks: int,
    timeout_s: float,
    rank_bytes: int | None,
    progress: Progress | None,
    *,
    available_bytes: int | None = None,
) -> list[Seen]:
    """Run a job on ranks that are forked here, once this machine's memory is known to be enough for them."""
    import msgspec

    from trainledger.runtime.launch.fork import run_forked
    from trainledger.runtime.launch.memory import check_host_memory

    if rank_bytes is not None:
        check_host_memory(ranks, rank_bytes, available_bytes)
    told = msgspec.json.encode(job.told)
    return run_forked(ranks, _does, job.name, told, timeout_s=timeout_s, progress=progress)


def _does(rank: int, name: str, told: bytes) -> Any:  # noqa: ANN401  # whatever the program of that name gives back
    """What one forked rank does: the program that torchrun would start by this name."""
    del rank
    import msgspec

    from trainledger.runtime.launch.rank import report
    from trainledger.runtime.main import JOBS

    program = JOBS[name]
    return program.run(msgspec.json.decode(told, type=program.told), report)
