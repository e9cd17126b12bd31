"""What a place in the step holds beside states and activations: gathered weights, gradients on their way, scratch.

An engine that keeps nothing of the kind answers zero everywhere. All answers are bytes [plans, rows].
"""

from __future__ import annotations

import numpy as np

from trainledger.account.shares import Shares
from trainledger.arrays import IntArray
from trainledger.inventory.inventory import Inventory


class Passing:
    """Nothing passes: the base of the engines that differ. A slot is a place of inventory/slots.py."""

    def __init__(self, inventory: Inventory, own: Shares) -> None:
        self.inventory = inventory
        self.own = own

    @property
    def none(self) -> IntArray:
        """Zero bytes for every stage."""
        return np.zeros_like(self.own.pp_stage)

    def forward(self, slot: int) -> IntArray:
        """While the last layer of a slot runs forward."""
        del slot
        return self.none

    def loss(self) -> IntArray:
        """While what follows the last block runs forward and backward."""
        return self.none

    def backward(self, slot: int, *, first: bool) -> IntArray:
        """While a layer runs backward: the first in that order, or the last."""
        del slot, first
        return self.none

    def reduced(self, slot: int, *, first: bool) -> IntArray:
        """When the gradients of a layer are handed over, its activations gone."""
        del slot, first
        return self.none
