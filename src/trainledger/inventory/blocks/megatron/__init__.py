"""Megatron-Core on TransformerEngine: norms and matrices in one, inputs kept as this rank's part of the tokens.

Before TransformerEngine, and in forks of that time, modules are Megatron's own (native.py).
"""

from __future__ import annotations

import numpy as np

from trainledger.arrays import IntArray
from trainledger.dtypes import bytes_of
from trainledger.inventory.blocks.megatron.model import Kit, embedding, gathered_input, layer, output
from trainledger.inventory.blocks.megatron.modules import Earlier, Modules
from trainledger.inventory.blocks.megatron.native import Native
from trainledger.inventory.blocks.parts import Parts
from trainledger.inventory.blocks.sizes import Sizes
from trainledger.inventory.inventory import Inventory
from trainledger.inventory.tape import Tape


def parts(inventory: Inventory, sizes: Sizes) -> Parts:
    """The parts of a model under a Setting."""
    return _parts(inventory, sizes, Modules, standing=0, beside=gathered_input(sizes))


def earlier_parts(inventory: Inventory, sizes: Sizes) -> Parts:
    """The same with the modules of TransformerEngine before 2.3."""
    return _parts(inventory, sizes, Earlier, standing=0, beside=gathered_input(sizes))


def native_parts(inventory: Inventory, sizes: Sizes) -> Parts:
    """The same of Megatron's own modules; one buffer serves all gathers and the scores before their softmax."""
    return _parts(
        inventory, sizes, Native, standing=np.maximum(gathered_input(sizes), _scores(inventory, sizes)), beside=0
    )


def deepspeed_parts(inventory: Inventory, sizes: Sizes) -> Parts:
    """The same modules before any buffer was shared. [megatron-deepspeed: megatron/model/transformer.py]"""
    return _parts(inventory, sizes, Native, standing=0, beside=0)


def _parts(inventory: Inventory, sizes: Sizes, kit: Kit, *, standing: IntArray | int, beside: IntArray | int) -> Parts:
    setting = inventory.setting
    mtp = inventory.table.at.mtp
    first = setting.scenario.recompute_layers

    region = setting.recomputed_region

    def layers(again: tuple[str, ...]) -> tuple[Tape, ...]:
        return tuple(
            layer(block, sizes, kit, again, predicts=slot == mtp, region=1 if slot == mtp else region)
            for slot, block in inventory.layers
        )

    return Parts(
        embedding=embedding(sizes, kit),
        blocks=layers(setting.recomputed_parts),
        between=layers(()) if first else (),
        first=first,
        region=region,
        final=output(sizes, kit, setting.loss),
        standing=standing,
        beside=beside,
    )


def _scores(inventory: Inventory, sizes: Sizes) -> IntArray:
    """[plans]: what a product of queries and keys is started from, where scores are made. [zero-bubble-fork]"""
    largest = np.zeros_like(sizes.tp)
    if sizes.setting.scenario.attention == "eager":
        for _, block in inventory.layers:
            if block.attention is not None:
                scores = sizes.tokens * sizes.setting.workload.seq * sizes.heads(block.attention)
                largest = np.maximum(largest, bytes_of(scores, sizes.dtype))
    return largest
