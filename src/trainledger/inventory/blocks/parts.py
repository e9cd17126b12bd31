"""The tapes of one stage's parts: what comes before the blocks, each kind of block, and what follows them."""

from __future__ import annotations

import dataclasses

from trainledger.arrays import IntArray
from trainledger.inventory.tape import Tape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of one micro-batch.

    blocks    in the order of Inventory.layers
    final     norm, output layer and loss
    standing  [plans]: bytes that every stage keeps for the whole run
    beside    [plans]: the same of a stage with an output layer
    every     of the layers of a kind only each so-manieth runs as `blocks` says, the others as `between` does
    region    one tape of `blocks` is of so many layers of its kind, which are recomputed together
    first     so do those after the first so many of each chunk; 0: all run as `blocks` says
    """

    embedding: Tape
    blocks: tuple[Tape, ...]
    final: Tape
    standing: IntArray | int = 0
    beside: IntArray | int = 0
    every: int = 1
    region: int = 1
    first: int = 0
    between: tuple[Tape, ...] = ()
