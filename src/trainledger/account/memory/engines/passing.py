"""What a place in the step holds beside states and activations: gathered weights, gradients on their way, scratch.

An engine that keeps nothing of the kind answers zero everywhere. All answers are bytes [plans, rows].
"""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar, Literal

import numpy as np

from trainledger.account.shares import Shares
from trainledger.arrays import IntArray
from trainledger.inventory.inventory import Inventory

Part = Literal["forward", "backward", "second", "handed", "end", "none"]
"""What happens at a place: a layer runs forward; it runs backward; it does so second, after one whose gradients are on
their way; its gradients are handed over; all backwards are over; nothing runs."""


class Passing:
    """Nothing passes: the base of the engines that differ. A slot is a place of inventory/slots.py.

    overlaps   what one layer hands over lies beside the next one that runs backward
    holds      what passes, in words
    cites      the keys of data/references.toml that say so
    """

    overlaps: bool = False
    holds: ClassVar[str] = "nothing"
    cites: ClassVar[tuple[str, ...]] = ()

    def __init__(self, inventory: Inventory, own: Shares) -> None:
        self.inventory = inventory
        self.own = own

    @cached_property
    def none(self) -> IntArray:
        """Zero bytes for every stage."""
        return np.zeros_like(self.own.pp_stage)

    def at(self, part: Part, slot: int, first: bool) -> IntArray:  # the three words that name a place
        """What passes at a place; of the layers of a slot, `first` is the first that runs backward."""
        match part:
            case "forward":
                return self.forward(slot)
            case "backward":
                return self.backward(slot, first=first)
            case "second":
                return self.second(slot)
            case "handed":
                return self.handed(slot, first=first)
            case "end":
                return self.end()
            case "none":
                return self.none

    def to_come(self, part: Part, slot: int, *, first: bool) -> IntArray:
        """Gradients that the states of a place count and that are not there yet: `at` has them taken off.

        Negative where more of them are there than the states count.
        """
        del part, slot, first
        return self.none

    def forward(self, slot: int) -> IntArray:
        """While the last layer of a slot runs forward."""
        del slot
        return self.none

    def backward(self, slot: int, *, first: bool) -> IntArray:
        """While a layer runs backward."""
        del slot, first
        return self.none

    def second(self, slot: int) -> IntArray:
        """While a layer runs backward right after the first of its slot that did."""
        return self.backward(slot, first=True)

    def end(self) -> IntArray:
        """When the last backward of a step is over."""
        return self.none

    def handed(self, slot: int, *, first: bool) -> IntArray:
        """When the gradients of a layer are handed over, its activations gone."""
        del slot, first
        return self.none
