"""What ranks do in the tests of recipes: steps with a fault planted on one rank, and what every rank then knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from parallel_runs import run_spec
from trainledger.errors import BadInput
from trainledger.facts.model_load import load_with_config
from trainledger.runtime.observe.clock import Clock
from trainledger.runtime.observe.collectives import CollectiveCounter
from trainledger.runtime.observe.dispatch import watching
from trainledger.runtime.observe.observation import Call
from trainledger.runtime.observe.tensors import local_part
from trainledger.runtime.precision.casts import CastCounts, casts_of, fall_back
from trainledger.runtime.program import Program, Stepped
from trainledger.runtime.spec import RunSpec, Scaling
from trainledger.runtime.world import World

CPU = torch.device("cpu")
SIZES: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
}
"""Of a Llama whose matrices are multiples of 16 over two ranks too."""
SCALE = 1024.0
STALE = 64.0
"""By how much a planted scale is too large: most of what it is used on saturates."""


def llama_spec(plan: dict[str, int], *, sizes: dict[str, object] | None = None, **fields: object) -> RunSpec:
    """A RunSpec of the small Llama."""
    overrides = {name: str(size) for name, size in (SIZES | (sizes or {})).items()}
    config, model = load_with_config("llama-3-8b", overrides=overrides)
    return run_spec(config, model, plan, **fields)


def program_of(spec: RunSpec) -> Program:
    """This rank's program."""
    return Program(spec, World(spec, CPU))


def plant_infinity(program: Program) -> None:
    """The next backward leaves an infinity in this rank's part of its last gradient."""
    unscale = program.precision.unscale

    def planted(optimizer: torch.optim.Optimizer) -> None:
        program.precision.unscale = unscale
        gradients = [kept.parameter.grad for kept in program.parameters if kept.parameter.grad is not None]
        own = [part for part in map(local_part, gradients) if part.numel()]
        own[-1].view(-1)[-1] = float("inf")
        unscale(optimizer)

    program.precision.unscale = planted


def weights_of(program: Program) -> list[torch.Tensor]:
    """A copy of this rank's part of every parameter."""
    return [local_part(kept.parameter).detach().clone() for kept in program.parameters]


class Overflow(NamedTuple):
    """What one rank sees of four steps, in the second of which `bad` has an infinity.

    kept    whether its parameters are the same bits after the second step as before
    moved   whether the third and the fourth moved them
    """

    steps: list[Stepped]
    kept: bool
    moved: bool


def overflow(rank: int, specs: list[RunSpec], bad: int) -> list[Overflow]:
    """One rank of the job has an infinity once, under each spec."""
    return [_overflow(program_of(spec), infinite=rank == bad) for spec in specs]


def _overflow(program: Program, *, infinite: bool) -> Overflow:
    steps = [program.step(0)]
    before = weights_of(program)
    if infinite:
        plant_infinity(program)
    steps.append(program.step(1))
    after = weights_of(program)
    steps += [program.step(2), program.step(3)]
    kept = all(map(torch.equal, before, after))
    return Overflow(steps, kept, moved=not all(map(torch.equal, after, weights_of(program))))


def at_minimum(rank: int, spec: RunSpec, bad: int) -> tuple[str, float | None]:
    """What a rank is told where one has infinities one step after another, and the scale at the end."""
    program = program_of(spec)
    try:
        for index in range(4):
            if rank == bad:
                plant_infinity(program)
            program.step(index)
    except BadInput as error:
        return str(error), program.precision.scale
    return "", program.precision.scale


class Saturated(NamedTuple):
    """What one rank knows of a run in which rank `bad` casts one operand under a scale that is too large.

    before, after   casts of all ranks in a step before the fault, in one with it, and after the layer has fallen back
    gemms           FP8 products of this rank in the first step
    calls           collectives of the first step and of the last
    state           what a checkpoint keeps at the end
    """

    before: list[CastCounts]
    with_fault: list[CastCounts]
    after: list[CastCounts]
    gemms: int
    calls: tuple[list[Call], list[Call]]
    state: dict[str, object]
    loss: float | None


def saturated(rank: int, spec: RunSpec, bad: int, layer: str, operand: str) -> Saturated:
    """Count, plant, count, let the layer fall back, count again."""
    program = program_of(spec)
    fp8 = program.precision.fp8
    assert fp8 is not None
    program.precision.count(on=True)
    first = _called(program, lambda: program.step(0))
    before, gemms = casts_of(program), sum(tally.gemms for tally in fp8.tallies.values())
    if rank == bad:
        fp8.tallies[layer].stale[operand] = STALE
    program.step(1)
    with_fault = casts_of(program)
    fall_back(program, layer)
    last: list[Stepped] = []
    calls = _called(program, lambda: last.append(program.step(2)))
    return Saturated(
        before, with_fault, casts_of(program), gemms, (first, calls), program.precision.state_dict(), last[0].loss
    )


def _called(program: Program, run: Callable[[], object]) -> list[Call]:
    counter = CollectiveCounter(program.world.names, Clock())
    with watching(counter):
        run()
    return list(counter.calls())


def losses(rank: int, specs: list[RunSpec]) -> list[list[float | None]]:
    """The losses of each spec, and of none whether FP8 products ran as many as its share says."""
    del rank
    found: list[list[float | None]] = []
    for spec in specs:
        program = program_of(spec)
        found.append([program.step(index).loss for index in range(spec.steps)])
    return found


def logits(rank: int, specs: list[RunSpec]) -> list[torch.Tensor]:
    """What each spec's program gives for the same tokens before any step."""
    del rank
    found: list[torch.Tensor] = []
    for spec in specs:
        program = program_of(spec)
        (module,) = program.modules
        (tokens, _), *_ = program.source(0)
        found.append(module(tokens).detach().float())
    return found


def scaling_spec(plan: dict[str, int], **settings: float) -> RunSpec:
    """A spec in fp16 with a small scale."""
    scaling = {"initial": SCALE, "growth_interval": 2, "minimum": 1.0, **settings}
    return llama_spec(plan, precision="fp16", scaling=Scaling(**scaling))  # type: ignore[arg-type]
