"""Reports of users, written down as plans before anything was predicted of them, against what is predicted.

tests/cases has a file for each thread: where it stands, what was reported, what it leaves open, and runs. A run is a
plan, and some of: fits; a peak within a band, of a meter; the tensor that a message asked for; host memory, weights or
states within a band. `told` says where a run was not seen and is what the thread advises or works out.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest

from trainledger.errors import TrainledgerError
from trainledger.facts.load import load_toml
from trainledger.service import check, ledger
from trainledger.service.requests import PlanRequest
from trainledger.service.typed import request_from

FOLDER = Path(__file__).parent / "cases"
FILES = sorted(FOLDER.glob("*.toml"))
MIB, GIB = 1 << 20, 1 << 30
RIGHT = 0.9
"""The share of runs that must come out as they were reported."""

LITGPT = "per layer and token three hidden tensors more were kept than torchtitan's compiled block keeps"
OFFLOADED = "checkpoints (38.7 GB) and states (16.4 GB) are all of its 56.2 GB: the rest was in host memory"
NOT_ON = "with checkpoints half of the card is free, as the report's other trainer shows: they were not on"
COMPLETIONS = "logits were kept of the 1024 tokens of each completion alone, which a reinforcement learner asks for"
WRONG: dict[str, str] = {
    "C055, 1.7B": COMPLETIONS,
    "C065, 8B, one million": OFFLOADED,
    "C095, trainer, micro-batch 2": NOT_ON,
    "C179, 10 layers, 8 cards": LITGPT,
    "C179, 20 layers, 8 cards": LITGPT,
}
"""Every run that does not, with the reason."""

Band = Annotated[tuple[float, float], "least, most"]


class Peak(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a meter showed at most, and the band that a prediction is to lie in."""

    meter: Literal["allocated", "reserved", "device"]
    gib: Band
    measured: float


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message, the name or family of the tensor it was about, and the tokens that the report works out from it."""

    message: str
    tensor: str
    tokens: Band | None = None


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One plan and what was seen of it."""

    name: str
    plan: dict[str, Any]
    told: Literal["reported", "advised", "worked out"] = "reported"
    fits: bool | None = None
    peak: Peak | None = None
    request: Asked | None = None
    host_gb: Band | None = None
    weights_gb: Band | None = None
    frozen_gb: Band | None = None
    states_mib: Band | None = None


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thread."""

    source: str
    url: str
    reported: str
    open: str
    run: list[Run]


@functools.cache
def cases() -> dict[str, Case]:
    return {path.stem: msgspec.convert(load_toml(path), Case) for path in FILES}


def runs() -> list[Any]:
    return [
        pytest.param(f"{name}, {run.name}", run, id=f"{name}-{run.name}")
        for name, case in cases().items()
        for run in case.run
    ]


def asked_of(run: Run) -> PlanRequest:
    """The plan as a request, its own cards and models taken from the folder of the cases."""
    placed = {
        key: str(FOLDER / value) if key in ("gpu", "model") and "/" in str(value) else value
        for key, value in run.plan.items()
    }
    return request_from(PlanRequest, placed, run.name)


def within(value: float, band: tuple[float, float]) -> bool:
    return band[0] <= value <= band[1]


def wrong(run: Run) -> list[str]:
    """What is predicted otherwise than it was reported; empty: all as reported."""
    try:
        found = ledger.account(asked_of(run))
    except TrainledgerError as error:
        return [f"refused: {error}"]
    memory, wrong = found.memory, list[str]()
    if run.fits is not None and memory.fits is not run.fits:
        device = memory.meters.get("device", memory.meters["allocated"]).estimate / GIB
        wrong.append(f"fits is {memory.fits} at {device:.1f} GiB")
    if run.peak is not None:
        meter = memory.meters.get(run.peak.meter)
        if meter is None or not within(meter.estimate / GIB, run.peak.gib):
            shown = "nothing" if meter is None else f"{meter.estimate / GIB:.1f} GiB"
            wrong.append(f"{run.peak.meter} is {shown}, where {run.peak.measured} were measured")
    if run.request is not None:
        wrong += _wrong_request(run, run.request)
    states = sum(memory.by_category[category] for category in ("weights", "gradients", "optimizer"))
    frozen = sum(line.amount for line in found.lines if line.id.startswith("held/weights/") and "frozen" in line.id)
    for what, value, band in (
        ("host memory in GB", memory.host_bytes / 1e9, run.host_gb),
        ("weights in GB", memory.by_category["weights"] / 1e9, run.weights_gb),
        ("frozen weights in GB", frozen / 1e9, run.frozen_gb),
        ("states in MiB", states / MIB, run.states_mib),
    ):
        if band is not None and not within(value, band):
            wrong.append(f"{what}: {value:.1f}")
    return wrong


def _wrong_request(run: Run, asked: Asked) -> list[str]:
    """What `check` says of the message otherwise: the tensor is the first candidate, or is inverted to the tokens."""
    given = msgspec.structs.asdict(asked_of(run))
    found = check.run(check.Request(**given, message=asked.message))
    assert isinstance(found, check.Response)
    if asked.tokens is not None:
        least, most = asked.tokens
        if any(one.family == asked.tensor and least <= one.tokens_at_least <= most for one in found.inversions):
            return []
        return [f"no inversion of {asked.tensor} comes to {least:.0f} to {most:.0f} tokens"]
    first = found.candidates[0] if found.candidates else None
    if first is not None and (first.family == asked.tensor or asked.tensor in first.name):
        return []
    return [f"the tensor asked for is {first.name if first else 'none'}, not {asked.tensor}"]


def test_every_case_is_a_thread_with_something_to_judge() -> None:
    assert len(cases()) >= 25
    for name, case in cases().items():
        assert case.url.startswith("https://"), name
        assert case.reported, name
        assert len({run.name for run in case.run}) == len(case.run), name
        for run in case.run:
            judged = {"name", "plan", "told"}
            outcomes = [value for field, value in msgspec.structs.asdict(run).items() if field not in judged]
            assert any(outcome is not None for outcome in outcomes), run.name
            if run.peak is not None:
                assert within(run.peak.measured, run.peak.gib), run.name


@pytest.mark.parametrize(("name", "run"), runs())
def test_a_run_is_predicted_as_it_was_reported(name: str, run: Run) -> None:
    """Or it is one of those that are known not to be."""
    assert bool(wrong(run)) == (name in WRONG), wrong(run) or f"{name} is right now: take it out of WRONG"


def test_nine_of_ten_are_right() -> None:
    names = {param.values[0] for param in runs()}
    assert set(WRONG) <= names
    assert len(WRONG) <= (1 - RIGHT) * len(names)
