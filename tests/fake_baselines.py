"""Records of runs that did not happen: steps that are drawn, with the noise of a machine that others use."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from trainledger.account.rank_memory import PEAK
from trainledger.reconcile.verdict import Verdict
from trainledger.records.record import Baseline, Machine, Rung, Step
from trainledger.runtime.progress import Progress
from trainledger.runtime.spec import RunSpec
from trainledger.runtime.timing.timed import Timed, TimedStep, Timing
from trainledger.service.prove_launch import How
from trainledger.service.prove_plan import planned
from trainledger.service.prove_request import Request

MACHINE = Machine(host="here", device="cpu", cores=2, torch_version="2.13.0", reference=1)
STEP_S, WORK_S, CALL_S, SUM_S = 0.02, 0.004, 0.001, 0.005
LINES = (
    Verdict(id=PEAK, rank=0, predicted=4096, measured=4096, unit="B", basis="modelled", verdict="within"),
    Verdict(
        id="held/weights/w", rank=0, predicted=64, measured=64, unit="B", basis="exact", verdict="equal", instant="rest"
    ),
    Verdict(
        id="moved/all_reduce/fp32:calls@dp",
        rank=0,
        predicted=3,
        measured=3,
        unit="calls",
        basis="exact",
        verdict="equal",
    ),
)


def spec_of(*, seed: int = 0, zero: int = 0) -> RunSpec:
    """A small run on two ranks."""
    return planned(Request(model="gpt2", dp=2, zero=zero, seed=seed)).spec


def drawn(
    draw: np.random.Generator, number: int, steps: int, *, slower: float = 1.0, machine: float = 1.0, ranks: int = 2
) -> list[Step]:
    """Steps of one round. The machine is slower for all of a round by a random factor, and for each step by another."""
    round_s = machine * math.exp(draw.exponential(0.2))
    found: list[Step] = []
    for step in range(steps):
        at = round_s * math.exp(draw.exponential(0.2))
        apart = math.exp(draw.standard_t(3) * 0.1)
        sums = (CALL_S * at, SUM_S * at) if ranks > 1 else (0.0, 0.0)
        found.append(
            Step(
                round=number,
                step=step,
                seconds=STEP_S * slower * at * apart,
                reference_work_s=WORK_S * at,
                reference_call_s=sums[0],
                reference_sum_s=sums[1],
            )
        )
    return found


ANY = (Step(round=0, step=0, seconds=1.0, reference_work_s=1.0, reference_call_s=1.0, reference_sum_s=1.0),)
"""Steps that say nothing, of a rung that is run again."""


def rung(steps: Sequence[Step], *, ranks: int = 2, tokens: int = 128, spec: RunSpec | None = None) -> Rung:
    """A rung with these steps."""
    return Rung(
        ranks=ranks,
        spec=msgspec.to_builtins(spec) if spec is not None else {"model": {"name": "one"}},
        tokens=tokens,
        flop=1000,
        calls=3 if ranks > 1 else 0,
        wire_bytes=1 << 20 if ranks > 1 else 0,
        reference_wire_bytes=1 << 20,
        allocator_peak_bytes=(),
        unexplained_bytes=0,
        unexplained_calls=0,
        lines=LINES,
        steps=tuple(steps),
    )


def baseline(
    name: str = "here", *, seed: int = 0, rounds: int = 10, steps: int = 5, slower: float = 1.0, machine: float = 1.0
) -> Baseline:
    """A record of one number of ranks."""
    draw = np.random.default_rng(seed)
    every = [one for number in range(rounds) for one in drawn(draw, number, steps, slower=slower, machine=machine)]
    return wrapped(name, rung(every))


def wrapped(name: str, *rungs: Rung) -> Baseline:
    """A record of these rungs."""
    return Baseline(
        name=name,
        made_at="2026-01-02T03:04:05+00:00",
        model="gpt2",
        layout="zero 0",
        scaling="weak",
        version="0.1.0",
        machine=MACHINE,
        rungs=rungs,
    )


class FakeClock:
    """Steps that are drawn in place of a run; those of a spec with a fault take a fifth longer."""

    def __init__(self, seed: int = 0) -> None:
        self.draw = np.random.default_rng(seed)
        self.told: list[tuple[Timed, How]] = []

    def __call__(self, timed: Timed, how: How, progress: Progress | None) -> Sequence[Timing]:
        """What every rank of a run would see."""
        slower = 1.2 if timed.run.faults else 1.0
        number = len(self.told)
        self.told.append((timed, how))
        steps = drawn(self.draw, number, timed.steps, slower=slower, ranks=len(how.ranks))
        plain = tuple(TimedStep(**_beside(step)) for step in steps)
        return [
            Timing(
                rank=rank,
                digest=timed.digest,
                steps=plain,
                reference_wire_bytes=1 << 20,
                allocator_peak_bytes=None,
                device="cpu",
                reference=1,
                torch_version="2.13.0",
            )
            for rank in how.ranks
        ]


def _beside(step: Step) -> dict[str, float]:
    return {name: getattr(step, name) for name in TimedStep.__struct_fields__}
