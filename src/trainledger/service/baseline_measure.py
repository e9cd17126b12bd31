"""The runs of a ladder: each observed once against its ledger, then all of them on the clock in turns.

A round starts the ranks of every rung anew, each rung alone on the machine, and the next round goes the other way: what
else the machine does meets all of them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from trainledger.reconcile.proof import proof
from trainledger.reconcile.verdict import Proof
from trainledger.records.record import Rung, Step
from trainledger.runtime.launch.memory import check_host_memory
from trainledger.runtime.progress import Progress
from trainledger.runtime.timing.timed import Timed, Timing
from trainledger.service.baseline_ladder import ranks_of
from trainledger.service.prove import Predictions, check_runtime
from trainledger.service.prove_launch import How, Runner, how_to_run
from trainledger.service.prove_plan import Planned


class Clock(Protocol):
    """Puts the steps of a run on the clock; what each rank saw, in rank order."""

    def __call__(self, timed: Timed, how: How, progress: Progress | None) -> Sequence[Timing]:
        """Run it."""
        ...


def on_the_clock(timed: Timed, how: How, progress: Progress | None) -> Sequence[Timing]:
    """Run with this package's own runtime."""
    from trainledger.runtime.launch import run_timed

    return run_timed(
        timed, cluster_args=how.cluster_args, timeout_s=how.timeout_s, rank_bytes=how.rank_bytes, progress=progress
    )


class Ready(NamedTuple):
    """A rung that can be run: its plan, what its ranks should see, where and how long."""

    plan: Planned
    predictions: Predictions
    how: How


def ready(rungs: Sequence[Planned], words: tuple[str, ...] | None, timeout_s: int) -> tuple[Ready, ...]:
    """All rungs with their predictions; what this machine's runtime or memory cannot do is refused before a start."""
    found: list[Ready] = []
    for plan in rungs:
        predictions = Predictions(plan, check_runtime(plan), forked=words is None)
        how = how_to_run(predictions.ranks, predictions.held_bytes, words, timeout_s)
        if words is None:
            knob = "" if plan.shrunken is not None else "--shrink, which makes the model small first"
            check_host_memory(ranks_of(plan), how.rank_bytes, knob=knob)
        found.append(Ready(plan, predictions, how))
    return tuple(found)


def observed(rung: Ready, runner: Runner, progress: Progress | None) -> Proof:
    """Every line of every rank, predicted and measured."""
    seen = runner(rung.plan.spec, rung.how, progress)
    return proof([(rung.predictions.whole(one.rank, dry=False), one) for one in seen])


class Timings(NamedTuple):
    """One rung on the clock: rank 0's steps of all rounds, and what the ranks of the last round had besides."""

    steps: list[Step]
    last: list[Timing]


def in_turns(
    runs: Sequence[tuple[Timed, How]], rounds: range, clock: Clock, progress: Progress | None
) -> list[Timings]:
    """Put every run on the clock in each of the rounds, which are numbered by the range."""
    found = [Timings([], []) for _ in runs]
    done, total = 0, len(rounds) * len(runs)
    for number in rounds:
        order = range(len(runs)) if number % 2 == 0 else reversed(range(len(runs)))
        for index in order:
            timed, how = runs[index]
            if progress is not None:
                progress(done, total, f"round {number + 1}, {len(how.ranks)} ranks")
            seen = list(clock(timed, how, None))
            assert len({one.digest for one in seen}) == 1, "all ranks have timed the same run"
            found[index].steps.extend(_steps(number, seen[0]))
            found[index].last[:] = seen
            done += 1
    return found


def _steps(number: int, seen: Timing) -> list[Step]:
    return [Step(round=number, step=at, **msgspec.structs.asdict(step)) for at, step in enumerate(seen.steps)]


def rung(of: Ready, found: Proof, timings: Timings) -> Rung:
    """All that is kept of one rung."""
    spec = of.plan.spec
    peaks = [one.allocator_peak_bytes for one in timings.last]
    predicted = [of.predictions.of(rank) for rank in of.predictions.ranks]
    return Rung(
        ranks=ranks_of(of.plan),
        spec=msgspec.to_builtins(spec),
        tokens=spec.seq * spec.sequences_per_step,
        flop=max(sum(amount.amount for amount in one.flop.values()) for one in predicted),
        calls=max(sum(sent.count for sent in one.calls) for one in predicted),
        wire_bytes=max(one.wire_bytes for one in predicted),
        reference_wire_bytes=timings.last[0].reference_wire_bytes,
        allocator_peak_bytes=tuple(peak for peak in peaks if peak is not None),
        unexplained_bytes=found.unexplained.bytes,
        unexplained_calls=found.unexplained.calls,
        lines=found.lines,
        steps=tuple(timings.steps),
    )
