"""Held-out loss of a program: the same in every layout, of as many sequences as are asked for."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch.nn import functional

from parallel_runs import SEQ
from pipeline_runs import spec_of
from trainledger.runtime.batch import Batch
from trainledger.runtime.launch.fork import run_forked
from trainledger.runtime.model import build_decoder, init_weights
from trainledger.runtime.program import Program
from trainledger.runtime.world import World

COUNTS = (1, 3, 4)
"""Of four sequences in two micro-batches."""

PLANS = {
    "alone": {"mbs": 2, "num_microbatches": 2},
    "pipeline": {"pp": 2, "mbs": 2, "num_microbatches": 2},
    "interleaved": {"pp": 2, "vpp": 2, "mbs": 2, "num_microbatches": 2},
    "tensor": {"tp": 2, "sp": 1, "mbs": 2, "num_microbatches": 2},
    "context": {"cp": 2, "mbs": 2, "num_microbatches": 2, "zero_stage": 3},
    "sharded": {"dp_shard": 2, "mbs": 2, "num_microbatches": 2, "zero_stage": 3},
    "replicas": {"dp_replicate": 2, "mbs": 2, "num_microbatches": 2},
}


def held_out() -> list[Batch]:
    """Two micro-batches of two sequences."""
    drawn = torch.randint(0, 64, (4, SEQ + 1), generator=torch.Generator().manual_seed(7))
    return [(part[:, :-1], part[:, 1:]) for part in drawn.split(2)]


def evaluated(rank: int, names: list[str]) -> list[tuple[list[float | None], float | None]]:
    """What this rank finds in each layout: held-out losses, then that of a step after them."""
    del rank
    found: list[tuple[list[float | None], float | None]] = []
    for name in names:
        spec = spec_of(PLANS[name], vocab=64, schedule="interleaved" if name == "interleaved" else "1f1b")
        program = Program(spec, World(spec, torch.device("cpu")))
        before = [program.evaluate(held_out(), count) for count in COUNTS]
        found.append((before, program.step(1).loss))
    return found


@cache
def expected() -> list[float]:
    """The means of a single decoder's losses."""
    spec = spec_of(PLANS["alone"], vocab=64)
    decoder = build_decoder(spec.model, spec.config)
    init_weights(decoder, spec.seed)
    losses: list[float] = []
    with torch.no_grad():
        for tokens, labels in held_out():
            losses += [
                float(functional.cross_entropy(decoder(own[None])[0].float(), wanted))
                for own, wanted in zip(tokens, labels, strict=True)
            ]
    return [sum(losses[:count]) / count for count in COUNTS]


@cache
def of_two() -> dict[str, list[tuple[list[float | None], float | None]]]:
    """What both ranks find, by layout."""
    names = [name for name in PLANS if name != "alone"]
    return dict(zip(names, map(list, zip(*run_forked(2, evaluated, names), strict=True)), strict=True))


def test_one_process_evaluates_as_many_sequences_as_are_asked_for() -> None:
    ((found, _),) = run_forked(1, evaluated, ["alone"])[0]
    assert found == pytest.approx(expected(), rel=1e-5)


@pytest.mark.parametrize("layout", [name for name in PLANS if name != "alone"])
def test_the_held_out_loss_is_that_of_one_process_in_every_layout(layout: str) -> None:
    first, second = of_two()[layout]
    if PLANS[layout].get("pp", 1) > 1:
        assert first == ([None] * len(COUNTS), None)
        first = second
    if layout == "context":
        # each rank has half of the tokens of every sequence, so that the means of both are their mean
        pairs = zip(first[0], second[0], strict=True)
        means = [(one + other) / 2 for one, other in pairs if one is not None and other is not None]
    else:
        assert first[0] == pytest.approx(second[0], rel=1e-6)
        means = first[0]
    assert means == pytest.approx(expected(), rel=1e-5)
    assert second[1] is not None, "it trains on after an evaluation"
