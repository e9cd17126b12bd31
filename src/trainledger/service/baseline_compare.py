"""`baseline compare`: whether one baseline may take the place of another, by a test that knows the noise of both."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal, get_args

import msgspec

from trainledger.errors import BadInput, UsageError
from trainledger.plans.limits import between
from trainledger.records.compare import Change, Moved, Peak, Word, change, moved, peak, peak_bytes
from trainledger.records.record import Baseline, Rung
from trainledger.records.scaling import CERTAIN
from trainledger.runtime.progress import Progress
from trainledger.runtime.spec import RunSpec
from trainledger.runtime.timing.timed import Timed
from trainledger.service.baseline_book import find
from trainledger.service.baseline_measure import Clock, in_turns, on_the_clock
from trainledger.service.baseline_request import BOOK, MOST_ROUNDS, MOST_STEPS, ROUNDS, STEPS
from trainledger.service.process import Process, process_since
from trainledger.service.prove import cluster_words, seconds_of
from trainledger.service.prove_launch import How, how_to_run
from trainledger.service.prove_request import CLUSTER_ARGS, TIMEOUT
from trainledger.service.requests import ANSWER, INPUT, RUN, flag

LEAST_PERCENT = 10.0
LOOKS = (1, 2, 4, 8)
"""Times of --rounds after which a comparison that runs again looks whether it can decide."""

Judged = Literal["throughput", "memory"]


class Request(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """Accept or reject one baseline in the place of another, with the lines that moved.

    Exit code 0 accepts, 4 does not. Steps are compared in units of a fixed reference that was timed beside each; with
    --again both layouts are run anew and take turns, which is fairer on a machine that others use.
    """

    a: Annotated[str, flag("What there was: the name or number of a record.", "A", group=INPUT, positional=True)]
    b: Annotated[str, flag("What takes its place.", "B", group=INPUT, positional=True)]
    book: Annotated[str | None, BOOK] = None
    again: Annotated[
        bool | None, flag("Run both again, in turns, until it is decided or --rounds are done eight times.", group=RUN)
    ] = None
    rounds: Annotated[int | None, flag(f"With --again: rounds before the first look [{ROUNDS}].", "N", group=RUN)] = (
        None
    )
    steps: Annotated[int | None, flag(f"With --again: steps on the clock in each round [{STEPS}].", "N", group=RUN)] = (
        None
    )
    cluster_args: Annotated[str | None, CLUSTER_ARGS] = None
    timeout: Annotated[int | None, TIMEOUT] = None
    least_change: Annotated[
        float | None,
        flag(f"The smallest slowdown of interest, in percent [{LEAST_PERCENT:g}].", "PERCENT", group=ANSWER),
    ] = None
    judge: Annotated[
        tuple[Judged, ...] | None,
        flag(
            "What a change for the worse is rejected for; the rest is only told [throughput,memory].",
            "WHAT,...",
            group=ANSWER,
        ),
    ] = None


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """Whether B may take the place of A.

    times      by number of ranks, a step per token of B over one of A
    peaks      of memory
    moved      lines of memory and traffic that are not the same, largest of any rank
    unproven   numbers of ranks at which B was not what its ledger says
    certain    probability with which all intervals of one look have the true value, at each number of ranks
    """

    a: str
    b: str
    layouts: tuple[str, str]
    again: bool
    least_percent: float
    certain: float
    judged: tuple[str, ...]
    times: tuple[Change, ...]
    peaks: tuple[Peak, ...]
    moved: tuple[Moved, ...]
    unproven: tuple[int, ...]
    verdict: Word
    run: Process

    @property
    def exit_code(self) -> int:
        """4 unless it is accepted."""
        return 0 if self.verdict == "accepted" else 4


def run(request: Request, *, clock: Clock | None = None, progress: Progress | None = None) -> Response:
    """Compare two records, or run both again."""
    start = time.perf_counter()
    least = _least(request)
    _check(request)
    a, b = find(request.book, (request.a, request.b))
    pairs = _pairs(a, b)
    if request.again:
        certain = 1 - (1 - CERTAIN) / len(LOOKS)
        times = _again(request, pairs, (least, certain), clock or on_the_clock, progress)
    else:
        _same_machine(a, b)
        certain = CERTAIN
        times = [change(x, y, pairs=False, least=least, certain=certain) for x, y in pairs]
    peaks = tuple(peak(x, y) for x, y in pairs)
    judged = request.judge if request.judge is not None else get_args(Judged)
    unproven = tuple(y.ranks for _, y in pairs if not y.proven)
    return Response(
        a=_said(a),
        b=_said(b),
        layouts=(a.layout, b.layout),
        again=request.again or False,
        least_percent=100 * least,
        certain=certain,
        judged=judged,
        times=tuple(times),
        peaks=peaks,
        moved=tuple(moved(a, b)),
        unproven=unproven,
        verdict=_verdict(judged, times, peaks, unproven),
        run=process_since(start),
    )


def _least(request: Request) -> float:
    percent = request.least_change if request.least_change is not None else LEAST_PERCENT
    if not 0 < percent <= 1000:
        raise BadInput(f"--least-change is {percent:g}: it must lie above 0 and not above 1000 percent")
    return percent / 100


def _check(request: Request) -> None:
    between("rounds", request.rounds, 1, MOST_ROUNDS)
    between("steps", request.steps, 1, MOST_STEPS)
    idle = [name for name in ("rounds", "steps", "cluster_args", "timeout") if getattr(request, name) is not None]
    if idle and not request.again:
        raise UsageError(f"--{idle[0].replace('_', '-')} is for a run, and nothing is run without --again; add it")
    if request.judge == ():
        raise UsageError("--judge none would accept anything; name throughput, memory or both")


def _pairs(a: Baseline, b: Baseline) -> list[tuple[Rung, Rung]]:
    """Rungs with the same number of ranks."""
    if _shapes(a) != _shapes(b):
        raise BadInput(
            f"{_said(a)} is of {a.model} and {_said(b)} of {b.model}, or of other sizes: a change of layout keeps the "
            "model; compare two records of one"
        )
    ours, theirs = a.by_ranks, b.by_ranks
    both = sorted(ours.keys() & theirs.keys())
    if not both:
        raise BadInput(
            f"{_said(a)} was run on {_listed(a)} ranks and {_said(b)} on {_listed(b)}: no number is the same; record "
            "one of them anew with --ranks"
        )
    return [(ours[ranks], theirs[ranks]) for ranks in both]


def _shapes(made: Baseline) -> dict[str, Any]:
    """The model of a record, wherever it was read."""
    return {**made.rungs[0].spec["model"], "source": ""}


def _same_machine(a: Baseline, b: Baseline) -> None:
    for name in ("device", "cores", "torch_version", "reference"):
        first, second = (getattr(made.machine, name) for made in (a, b))
        if first != second:
            raise BadInput(
                f"{_said(a)} and {_said(b)} were measured under another {name.replace('_', ' ')} ({first}, {second}), "
                "so their times say nothing of their layouts; run both --again on one machine"
            )


def _again(
    request: Request,
    pairs: list[tuple[Rung, Rung]],
    judged: tuple[float, float],
    clock: Clock,
    progress: Progress | None,
) -> list[Change]:
    """Put both sides on the clock in turns, and look after --rounds, and each time that they are twice as many."""
    least, certain = judged
    words = cluster_words(request.cluster_args)
    runs = [[_told(request, rung, words) for rung in pair] for pair in pairs]
    now = [[msgspec.structs.replace(rung, steps=()) for rung in pair] for pair in pairs]
    found: list[Change | None] = [None] * len(pairs)
    rounds = request.rounds or ROUNDS
    for before, times in zip((0, *LOOKS), LOOKS, strict=False):
        turn = range(before * rounds, times * rounds)
        for index, pair in enumerate(now):
            done = found[index]
            if done is not None and done.verdict != "undecided":
                continue
            timings = in_turns(runs[index], turn, clock, progress)
            now[index] = [
                msgspec.structs.replace(rung, steps=(*rung.steps, *seen.steps))
                for rung, seen in zip(pair, timings, strict=True)
            ]
            found[index] = change(*now[index], pairs=True, least=least, certain=certain)
    return [one for one in found if one is not None]


def _told(request: Request, of: Rung, words: tuple[str, ...] | None) -> tuple[Timed, How]:
    """What the ranks of a record are told when it is run again."""
    try:
        spec = msgspec.convert(of.spec, RunSpec)
    except msgspec.ValidationError as error:
        raise BadInput(
            f"a record of {of.ranks} ranks was made by another release, and is not run again ({error}); record it anew"
        ) from None
    how = how_to_run(tuple(range(of.ranks)), peak_bytes(of), words, seconds_of(request.timeout))
    return Timed(run=spec, steps=request.steps or STEPS), how


def _verdict(judged: tuple[str, ...], times: list[Change], peaks: tuple[Peak, ...], unproven: tuple[int, ...]) -> Word:
    words: set[Word] = set()
    if "throughput" in judged:
        words |= {one.verdict for one in times}
    if "memory" in judged:
        words |= {one.verdict for one in peaks}
    if unproven or "rejected" in words:
        return "rejected"
    return "undecided" if "undecided" in words else "accepted"


def _said(made: Baseline) -> str:
    return f"{made.name} ({made.number})"


def _listed(made: Baseline) -> str:
    return ", ".join(str(rung.ranks) for rung in made.rungs)
