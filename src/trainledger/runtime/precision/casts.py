"""What casts to FP8 lost, layer by layer, over the whole job: every rank learns the same, and acts the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist

from trainledger.runtime.precision.share import fp8_layers
from trainledger.runtime.spec import OPERANDS

if TYPE_CHECKING:
    from trainledger.runtime.program import Program


class CastCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one operand of one layer, all casts of all ranks together.

    elements    how many were cast; one that is cast for two products counts twice
    saturated   beyond the largest code by more than rounding, or not a number
    flushed     cast to zero, and were not
    """

    layer: str
    operand: str
    elements: int
    saturated: int
    flushed: int

    @property
    def saturated_share(self) -> float:
        """Of the elements."""
        return self.saturated / self.elements

    @property
    def flushed_share(self) -> float:
        """Of the elements."""
        return self.flushed / self.elements


def casts_of(program: Program) -> list[CastCounts]:
    """What was cast since the last call, where something was, in the order of the layers.

    A collective, and one only: all ranks call it after the same step. Casts are counted while `Recipe.count` is on.
    """
    fp8, world = program.precision.fp8, program.world
    if fp8 is None:
        return []
    layers = fp8_layers(program.spec.model)
    counts = torch.zeros(len(layers), len(OPERANDS), 3, dtype=torch.int64, device=world.device)
    for index, layer in enumerate(layers):
        tally = fp8.tallies.get(layer)
        if tally is not None and tally.counts is not None:
            counts[index] += tally.counts
            tally.clear()
    if (group := world.group("world")) is not None:
        dist.all_reduce(counts, group=group)
    return [
        CastCounts(layer=layer, operand=operand, elements=elements, saturated=saturated, flushed=flushed)
        for layer, of_layer in zip(layers, counts.tolist(), strict=True)
        for operand, (elements, saturated, flushed) in zip(OPERANDS, of_layer, strict=True)
        if elements
    ]


def fall_back(program: Program, layer: str) -> None:
    """Let a layer compute in 16 bits from now on. All ranks call it between the same two steps."""
    program.precision.fall_back(layer, program.parameters)
