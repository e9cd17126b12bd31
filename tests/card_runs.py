"""What the tests of scripts/cards run in a process of its own: every figure of a CPU that they look at."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import msgspec
import torch

CPU = torch.device("cpu")


class Seen(NamedTuple):
    """Rows by id, as plain data; what two counters say of one block; errors of products in FP8."""

    rows: dict[str, dict[str, Any]]
    counted: tuple[int, int]
    extra: int
    errors: dict[str, float]


def seen(rank: int) -> Seen:
    """Measure this process's CPU, whose process group has one rank; scripts are on the path."""
    del rank
    here, saved, peaks, steps, sizes = (
        importlib.import_module(f"cards.{name}") for name in ("here", "saved", "peaks", "steps", "sizes")
    )
    small = sizes.CPU
    llama, _, mixtral = small.blocks
    ways = (
        saved.Way(llama, "flash", False, "none"),
        saved.Way(llama, "flash", False, "full"),
        saved.Way(llama, "math", False, "none"),
        saved.Way(llama, "flash", True, "none"),
        saved.Way(mixtral, "flash", False, "none"),
    )
    rows = [row for way in ways for row in saved.rows_of(way, CPU, small)]
    rows += [row for plan in peaks.PLANS[:2] for row in peaks.rows_of(plan, CPU, small)]
    rows += steps.rows_of(CPU, small)
    here.forget(CPU)
    counted, extra = _counted_twice(saved, ways[0], small.backend)
    return Seen({row.id: msgspec.structs.asdict(row) for row in rows}, counted, extra, errors(CPU))


def _counted_twice(saved: Any, way: Any, backend: str) -> tuple[tuple[int, int], int]:  # noqa: ANN401  # of a script
    """(by the observer, by hooks) of one block; and what the observer says more once the block keeps a tensor more."""
    block = saved.Block(way, CPU, backend)
    before = saved.by_observer(block)
    hooked = saved.by_hooks(block)
    plain = block.run

    def keeping(hidden: torch.Tensor, context: object) -> torch.Tensor:
        out = plain(hidden, context)
        return out * torch.ones_like(out)

    block.run = keeping
    return (before, hooked), saved.by_observer(block) - before


def errors(device: torch.device) -> dict[str, float]:
    """Of each recipe's product, with its casts and without: the largest error over the largest element."""
    gemms = importlib.import_module("cards.gemms")
    generator = torch.Generator().manual_seed(1)
    given, weight = (torch.randn(rows, 64, generator=generator).bfloat16().to(device) for rows in (32, 48))
    exact = given.float() @ weight.float().t()
    found: dict[str, float] = {}
    for recipe in gemms.RECIPES:
        one = gemms.Fp8Product(recipe, given, weight)
        for way in (one.product, one.with_casts):
            error = (way().float() - exact).abs().max() / exact.abs().max()
            found[f"{recipe} {way.__name__}"] = float(error)
    return found
