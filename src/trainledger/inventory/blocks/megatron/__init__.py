"""Megatron-Core on TransformerEngine: norms and matrices in one, inputs kept as this rank's part of the tokens."""

from __future__ import annotations

from trainledger.inventory.blocks.megatron.model import embedding, gathered_input, layer, output
from trainledger.inventory.blocks.parts import Parts
from trainledger.inventory.blocks.sizes import Sizes
from trainledger.inventory.inventory import Inventory


def parts(inventory: Inventory, sizes: Sizes) -> Parts:
    """The parts of a model under a Setting."""
    setting = inventory.setting
    again = setting.recomputed_parts
    mtp = inventory.table.at.mtp
    return Parts(
        embedding=embedding(sizes),
        blocks=tuple(layer(block, sizes, again, predicts=slot == mtp) for slot, block in inventory.layers),
        final=output(sizes, setting.loss),
        beside=gathered_input(sizes),
    )
