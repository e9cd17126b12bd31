"""`baseline run`: a layout at several numbers of ranks, measured beside its ledger, and kept in the run book."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec

import trainledger
from trainledger.account.rank_memory import PEAK
from trainledger.errors import BadInput, TrainledgerError
from trainledger.reconcile.verdict import WRONG
from trainledger.records.record import Baseline, Machine, Rung, Scaling
from trainledger.records.scaling import Scaled, scaled
from trainledger.runtime.progress import Progress
from trainledger.runtime.timing.timed import Timed, Timing
from trainledger.service.baseline_book import Exported, book, book_path
from trainledger.service.baseline_ladder import ladder
from trainledger.service.baseline_measure import Clock, Ready, in_turns, observed, on_the_clock, ready, rung
from trainledger.service.baseline_request import BOOK, ROUNDS, STEPS, LadderRequest
from trainledger.service.process import Process, process_since
from trainledger.service.prove import cluster_words, seconds_of
from trainledger.service.prove_launch import Runner, launch
from trainledger.service.requests import INPUT, flag
from trainledger.service.shrink import Shrunken

NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
"""A number stands for a record of the book, so a name begins with a letter."""


class Request(LadderRequest, frozen=True, kw_only=True, rename="kebab"):
    """Run a layout at several numbers of ranks, and record throughput, memory, traffic and scaling beside its ledger.

    The model is run as it is unless --shrink makes it small. Each number of ranks is observed once, line by line, and
    then put on the clock in rounds, in which all of them take turns.
    """

    name: Annotated[
        str | None, flag("Name of the record; the newest of a name is what it stands for [MODEL].", "NAME", group=INPUT)
    ] = None
    book: Annotated[str | None, BOOK] = None


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """The peak of the rank that holds most, and lines of memory by verdict.

    peak_bytes             seen alive in the observed step
    predicted_bytes        of the same rank; null where the router decides
    allocator_peak_bytes   of the caching allocator, the most of any rank; null where there is none
    """

    peak_bytes: int
    predicted_bytes: int | None
    allocator_peak_bytes: int | None
    lines: int
    wrong: int


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives of a step, all ranks together: calls, bytes passed in and written; lines by verdict."""

    calls: int
    predicted_calls: int
    bytes: int
    predicted_bytes: int
    lines: int
    wrong: int


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One number of ranks."""

    scaled: Scaled
    memory: Memory
    traffic: Traffic
    unexplained_bytes: int
    unexplained_calls: int


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A baseline, as it stands in the run book under `number`.

    rungs      the fewest ranks first
    verdict    differs where a line of a rank is not as predicted, or something is not explained
    """

    name: str
    number: int
    book: str
    model: str
    layout: str
    scaling: Scaling
    rounds: int
    steps: int
    shrunken: Shrunken | None
    machine: Machine
    rungs: tuple[Result, ...]
    verdict: str
    run: Process

    @property
    def exit_code(self) -> int:
        """4 where something differs from its ledger."""
        return 0 if self.verdict == "proven" else 4


def run(
    request: Request, *, runner: Runner | None = None, clock: Clock | None = None, progress: Progress | None = None
) -> Response:
    """Plan every rung, observe each, put all on the clock, and keep the record."""
    start = time.perf_counter()
    words, timeout_s = cluster_words(request.cluster_args), seconds_of(request.timeout)
    plans = ladder(request)
    name = _name(request, plans[0].run.setting.model.name)
    with book(request.book, create=True):
        pass  # what is wrong with the book is said before hours are spent
    rungs = ready(plans, words, timeout_s)
    made = _measured(request, name, rungs, (runner or launch, clock or on_the_clock), progress)
    kept = _keep(request.book, made)
    results = tuple(_result(one, of) for one, of in zip(kept.rungs, scaled(kept), strict=True))
    return Response(
        name=name,
        number=kept.number,
        book=str(book_path(request.book)),
        model=kept.model,
        layout=kept.layout,
        scaling=kept.scaling,
        rounds=request.rounds or ROUNDS,
        steps=request.steps or STEPS,
        shrunken=rungs[0].plan.shrunken,
        machine=kept.machine,
        rungs=results,
        verdict="proven" if all(one.proven for one in kept.rungs) else "differs",
        run=process_since(start),
    )


def _name(request: Request, model: str) -> str:
    if request.name is None:
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-")[:64]
        return plain if NAME.fullmatch(plain) else f"model-{plain}"[:64].rstrip("-")
    if not NAME.fullmatch(request.name):
        raise BadInput(
            f"--name {request.name!r} is no name of a record: a letter, then letters, digits, dots, underscores and "
            "hyphens, 64 in all"
        )
    return request.name


def _measured(
    request: Request, name: str, rungs: Sequence[Ready], how: tuple[Runner, Clock], progress: Progress | None
) -> Baseline:
    proofs = [observed(one, how[0], progress) for one in rungs]
    runs = [(Timed(run=one.plan.spec, steps=request.steps or STEPS), one.how) for one in rungs]
    timings = in_turns(runs, range(request.rounds or ROUNDS), how[1], progress)
    return Baseline(
        name=name,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        model=rungs[0].plan.run.setting.model.name,
        layout=layout_of(rungs[0]),
        scaling=request.scaling or "weak",
        version=trainledger.__version__,
        machine=machine_of(timings[0].last[0]),
        rungs=tuple(rung(one, found, seen) for one, found, seen in zip(rungs, proofs, timings, strict=True)),
    )


def layout_of(of: Ready) -> str:
    """What of the plan does not change from rung to rung, in words."""
    spec = of.plan.spec
    degrees = [
        f"{name.replace('_', '-')} {spec.plan[name]}"
        for name in ("tp", "pp", "vpp", "cp", "ep", "dp_replicate")
        if spec.plan[name] > 1
    ]
    words = [spec.precision, spec.optimizer, f"recompute {spec.recompute}"]
    return ", ".join(
        [f"zero {spec.plan['zero_stage']}", *degrees, f"mbs {spec.plan['mbs']}", f"seq {spec.seq}", *words]
    )


def machine_of(seen: Timing) -> Machine:
    """Where this was measured, as rank 0 saw it."""
    return Machine(
        host=platform.node(),
        device=seen.device,
        cores=os.cpu_count() or 0,
        torch_version=seen.torch_version,
        reference=seen.reference,
    )


def _keep(given: str | None, made: Baseline) -> Baseline:
    """Write the record; where the book cannot take it, leave it beside the book and say how it comes in."""
    from trainledger.records.store import write

    try:
        with book(given, create=True) as db:
            return write(db, made)
    except TrainledgerError as error:
        path = book_path(given)
        beside = Path(f"{path}.{made.name}.{int(time.time())}.json")
        beside.write_bytes(msgspec.json.encode(Exported(baselines=(made,))))
        raise BadInput(
            f"{error}; what was measured is in {beside}: `trainledger baseline import {beside}` puts it into a book"
        ) from None


def _result(of: Rung, found: Scaled) -> Result:
    peaks = [line for line in of.lines if line.id == PEAK]
    most = max(peaks, key=lambda line: line.measured or 0)
    held = [line for line in of.lines if line.id.startswith("held/")]
    sent = [line for line in of.lines if line.id.startswith("moved/") and ":conserved" not in line.id]
    return Result(
        scaled=found,
        memory=Memory(
            peak_bytes=most.measured or 0,
            predicted_bytes=most.predicted,
            allocator_peak_bytes=max(of.allocator_peak_bytes, default=None),
            lines=len(held),
            wrong=sum(line.verdict in WRONG for line in held),
        ),
        traffic=Traffic(
            calls=sum(line.measured or 0 for line in sent if line.unit == "calls"),
            predicted_calls=sum(line.predicted or 0 for line in sent if line.unit == "calls"),
            bytes=sum(line.measured or 0 for line in sent if line.unit == "B"),
            predicted_bytes=sum(line.predicted or 0 for line in sent if line.unit == "B"),
            lines=len(sent),
            wrong=sum(line.verdict in WRONG for line in sent),
        ),
        unexplained_bytes=of.unexplained_bytes,
        unexplained_calls=of.unexplained_calls,
    )
