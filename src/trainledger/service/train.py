"""`train`: a plan is trained on real text, and what it held and sent is put beside what was predicted."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from trainledger.errors import TrainledgerError
from trainledger.plans.ranks import world_size
from trainledger.reconcile.proof import proof
from trainledger.reconcile.verdict import Unexplained, Verdict
from trainledger.report.curves import page
from trainledger.runtime.files import write_whole
from trainledger.runtime.progress import Progress
from trainledger.runtime.train.metrics import Line, lines_of
from trainledger.runtime.train.result import Layer, Trained, Written
from trainledger.runtime.train.spec import METRICS, REPORT, STOP, TrainSpec
from trainledger.runtime.train.stop import asking
from trainledger.service.common import Note, notes
from trainledger.service.ledger import Engine, PlanDegrees, engine_of, plan_degrees
from trainledger.service.prove import (
    MOST_TIMEOUT_S,
    Predictions,
    ProgramProcess,
    check_runtime,
    cluster_words,
    program_process,
    seconds_of,
)
from trainledger.service.prove_launch import How, how_to_run
from trainledger.service.train_plan import Ready, ready
from trainledger.service.train_request import Request

__all__ = ["Request", "Response", "run"]

SIGNALLED = 128
"""What a shell adds to the number of a signal."""


class Runner(Protocol):
    """Trains on all ranks and gives back what each has to say, in rank order."""

    def __call__(self, spec: TrainSpec, how: How, progress: Progress | None) -> Sequence[Trained]:
        """Run it."""
        ...


class Gemms(msgspec.Struct, frozen=True, kw_only=True):
    """Matrix products of one optimizer step of the whole job.

    gemms, fp8_gemms      calls with weight matrices; of those, in FP8
    fp8_share             of the FLOP of weight matrices
    fp8_share_of_all      of the FLOP with attention
    ran                   products in FP8 that the first step was seen to run; null under a recipe without FP8
    fallen                layers that have fallen back to 16 bits
    lost                  by casts to FP8, in the last step that was counted
    """

    gemms: int
    fp8_gemms: int
    fp8_share: float
    fp8_share_of_all: float
    ran: int | None
    fallen: tuple[str, ...]
    lost: tuple[Layer, ...]


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a run.

    ended             finished: all steps are taken; stopped: it was asked to, saved, and can go on
    steps, steps_asked   that have been taken in all, and that it was to take
    resumed_from      the checkpoint that this process went on from, after so many steps (first); "" for none
    passed_over       newer checkpoints that could not be loaded, and why
    loss              of the last step; first_loss of the first of the whole run
    signal            that asked this process to stop; null where none did
    tokens_per_s      median of the steps that nobody observed; null where there was none
    memory_bytes      of the rank that held most, by meter: allocated on CUDA, else resident
    observed_step     the step that `lines` are of; 0 where none was
    lines             of every rank, predicted and measured
    """

    model: str
    profile: Engine
    plan: PlanDegrees
    world_size: int
    ended: Literal["finished", "stopped"]
    steps: int
    steps_asked: int
    first: int
    resumed_from: str
    passed_over: tuple[tuple[str, str], ...]
    tokens: int
    first_loss: float | None
    loss: float | None
    held_out_loss: float | None
    held_out_sequences: int
    tokens_per_s: float | None
    gemms: Gemms
    scale: float | None
    skipped: int
    checkpoints: tuple[Written, ...]
    memory_bytes: int
    meter: Literal["allocated", "resident"]
    observed_step: int
    lines: tuple[Verdict, ...]
    unexplained: Unexplained
    said: tuple[str, ...]
    out: str
    metrics: str
    report: str
    go_on: str
    assumed: dict[str, str | int]
    notes: tuple[Note, ...]
    signal: int | None
    run: ProgramProcess

    @property
    def exit_code(self) -> int:
        """Of a run that was stopped, what a shell gives to a process that the signal ended."""
        return SIGNALLED + (self.signal or signal.SIGTERM) if self.ended == "stopped" else 0


def run(request: Request, *, runner: Runner | None = None, progress: Progress | None = None) -> Response:
    """Plan, train and compare; `runner` in place of this package's own runtime."""
    start = time.perf_counter()
    words = cluster_words(request.cluster_args)
    one = ready(request)
    predictions = Predictions(one.plan, check_runtime(one.plan), forked=words is None)
    timeout_s = MOST_TIMEOUT_S if one.request.timeout is None else seconds_of(one.request.timeout)
    how = how_to_run(predictions.ranks, predictions.held_bytes, words, timeout_s)
    out = Path(one.spec.out)
    before = _last_step(out)
    try:
        with asking(out / STOP) as asked:
            seen = (runner or _launch)(one.spec, how, progress)
    except TrainledgerError as error:
        # the page of a run that this one was refused to go on with stays as it is
        if _last_step(out) != before:
            _draw(one, None, str(error))
        raise
    process = program_process(start, seen[0].torch_version)
    response = _response(one, predictions, seen, asked.signal, process)
    _draw(one, response, "")
    return response


def _last_step(out: Path) -> Line | None:
    return next(reversed(list(lines_of(out / METRICS))), None)


def _launch(spec: TrainSpec, how: How, progress: Progress | None) -> Sequence[Trained]:
    from trainledger.runtime.launch import run_training

    return run_training(
        spec, cluster_args=how.cluster_args, timeout_s=how.timeout_s, rank_bytes=how.rank_bytes, progress=progress
    )


def _response(
    one: Ready, predictions: Predictions, seen: Sequence[Trained], asked: int | None, process: ProgramProcess
) -> Response:
    first, spec, run = seen[0], one.spec, one.plan.run
    assert len({each.digest for each in seen}) == 1, "all ranks have trained the same run"
    pairs = [
        (predictions.whole(each.rank, dry=False), each.observation) for each in seen if each.observation is not None
    ]
    found = proof(pairs) if pairs else None
    metrics = Path(spec.out) / METRICS
    stopped = first.how == "stopped"
    return Response(
        model=run.setting.model.name,
        profile=engine_of(run),
        plan=plan_degrees(run, one.plan.plans),
        world_size=world_size(spec.plan),
        ended=first.how,
        steps=first.steps,
        steps_asked=spec.run.steps,
        first=first.first,
        resumed_from=first.resumed_from,
        passed_over=first.passed_over,
        tokens=first.tokens,
        first_loss=next((line.loss for line in lines_of(metrics)), None),
        loss=first.loss,
        held_out_loss=first.held_out,
        held_out_sequences=first.held_out_sequences,
        tokens_per_s=first.tokens_per_s,
        gemms=_gemms(first),
        scale=first.scale,
        skipped=first.skipped,
        checkpoints=first.checkpoints,
        memory_bytes=max(each.memory_bytes for each in seen),
        meter=first.meter,
        observed_step=first.observed_step,
        lines=found.lines if found is not None else (),
        unexplained=found.unexplained if found is not None else Unexplained(bytes=0, calls=0, items=()),
        said=first.said,
        out=spec.out,
        metrics=str(metrics),
        report=str(Path(spec.out) / REPORT),
        go_on="the same command with --resume" if stopped else "",
        assumed=one.assumed,
        notes=notes(*one.plan.asked),
        signal=asked,
        run=process,
    )


def _gemms(seen: Trained) -> Gemms:
    share = seen.share
    return Gemms(
        gemms=share.gemms,
        fp8_gemms=share.fp8_gemms,
        fp8_share=share.of_linear,
        fp8_share_of_all=share.of_all,
        ran=seen.ran,
        fallen=seen.fallen,
        lost=seen.lost,
    )


def _draw(one: Ready, response: Response | None, wrong: str) -> None:
    """Write the curves of all steps that were written down, if there are any."""
    out = Path(one.spec.out)
    steps = list(lines_of(out / METRICS))
    if not steps:
        return
    facts = {
        "model": one.plan.run.setting.model.name,
        "ranks": str(world_size(one.spec.plan)),
        "precision": one.spec.run.precision,
        "steps": f"{steps[-1].step} of {one.spec.run.steps}",
    }
    write_whole(out / REPORT, page(out.name, facts, steps, msgspec.to_builtins(response), wrong).encode())
