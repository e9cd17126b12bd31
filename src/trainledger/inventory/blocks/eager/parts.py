"""The parts of a model for a ledger, whose Model has no config: its rules are those that shapes tell."""

from __future__ import annotations

import dataclasses

import numpy as np

from trainledger.arrays import IntArray
from trainledger.dtypes import bytes_of
from trainledger.facts.model import Block
from trainledger.inventory.blocks import plain
from trainledger.inventory.blocks.eager.model import Eager
from trainledger.inventory.blocks.parts import Parts
from trainledger.inventory.blocks.sizes import Sizes
from trainledger.inventory.inventory import Inventory
from trainledger.inventory.tape import Program, Tape, Value, retained, walk
from trainledger.plans.setting import Setting


def parts(inventory: Inventory, sizes: Sizes) -> Parts:
    """The parts under a Setting; rotary tables stand for as long as a forward and its backward."""
    setting = sizes.setting
    eager: Eager[Tape] = Eager(sizes, inventory.presumed, _putting_off if _splits(setting) else walk)
    return Parts(
        embedding=eager.embedding(),
        blocks=layers(inventory, eager),
        final=_final(eager, sizes),
        standing=_tables(eager, sizes),
    )


def layers(inventory: Inventory, made: Eager[Tape]) -> tuple[Tape, ...]:
    """The layers of each kind; those that are not attention and a network are plain ones."""
    again = made.sizes.setting.scenario.recompute == "full"

    def layer(block: Block) -> Tape:
        if block.attention is None or (block.mlp is None and block.moe is None):
            return plain.block(block, made.sizes, recomputed=again)
        return made.layer(block, block.layers[0])

    return tuple(layer(block) for _, block in inventory.layers)


def _final(eager: Eager[Tape], sizes: Sizes) -> Tape:
    """What follows the last layer; of it nothing of the loss waits for gradients of weights that are put off."""
    found = eager.final()
    return dataclasses.replace(found, factors=eager.output().factors) if _splits(sizes.setting) else found


def _splits(setting: Setting) -> bool:
    """Whether gradients of weights are put off."""
    return setting.scenario.schedule == "zero-bubble"


def _putting_off(program: Program, output: Value | None) -> Tape:
    """A tape whose gradients of weights may wait: for them the whole graph does, and what reached each operation."""
    split = retained(program, output)
    stays = split.tape.bytes[list(split.stays)].sum(axis=0)
    return dataclasses.replace(walk(program, output), factors=(stays,))


def _tables(eager: Eager[Tape], sizes: Sizes) -> IntArray:
    """[plans]: cosine and sine of every position, in each table that layers name."""
    named = {rule.rotary for rule in eager.rules.attention}
    length = sizes.setting.workload.seq // sizes.plans.cp
    turning = sum(rule.dim for name, rule in eager.rules.rotary.items() if name in named)
    return np.asarray(2 * bytes_of(length * turning, sizes.dtype))
