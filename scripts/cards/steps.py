"""How fast the program trains one model in bf16 and in FP8, step by step in turns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from cards.here import forget, in_turns
from cards.record import Row, several
from cards.sizes import Sizes
from trainledger.runtime.program import Program
from trainledger.runtime.world import World
from trainledger.service.prove_plan import planned

RECIPES = ("bf16", "fp8-tensorwise")


def rows_of(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Seconds of a step and tokens per second of each recipe, and how many times as fast FP8 is.

    Needs a process group of one rank. Both programs are there at once, so that their steps can take turns.
    """
    forget(device)
    subject = sizes.trained
    found = in_turns({recipe: _steps(recipe, device, sizes) for recipe in RECIPES}, device, sizes.pairs)
    tokens = subject.mbs * subject.seq
    for recipe, seconds in found.items():
        name = f"step/{subject.model}/{recipe}"
        yield several(f"{name}/seconds", "s", seconds)
        yield several(f"{name}/tokens", "tokens/s", [tokens / each for each in seconds])
    plain, cast = (found[recipe] for recipe in RECIPES)
    ratios = [before / after for before, after in zip(plain, cast, strict=True)]
    yield several(f"step/{subject.model}/{RECIPES[1]} over {RECIPES[0]}/speed", "times", ratios)


def _steps(recipe: str, device: torch.device, sizes: Sizes) -> Callable[[], object]:
    """A step of a program, and the next one each time it is called."""
    spec = planned(sizes.trained.request(precision=recipe)).spec
    program, count = Program(spec, World(spec, device)), itertools.count()
    return lambda: program.step(next(count))
