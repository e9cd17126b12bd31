"""The tapes of one stage's parts: what comes before the blocks, each kind of block, and what follows them."""

from __future__ import annotations

import dataclasses

from trainledger.inventory.tape import Tape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """blocks: in the order of Inventory.layers; final: norm, output layer and loss of one micro-batch."""

    embedding: Tape
    blocks: tuple[Tape, ...]
    final: Tape
