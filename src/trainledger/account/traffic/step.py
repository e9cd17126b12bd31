"""Sizes and counts of one optimizer step that every model-parallel axis shares."""

from __future__ import annotations

import numpy as np

from trainledger.account.shares import Shares
from trainledger.arrays import IntArray
from trainledger.dtypes import bytes_of
from trainledger.inventory.inventory import Inventory


class Step:
    """Sizes and counts that every axis shares: arrays [plans] and [plans, rows].

    blocks, again   [plans, rows, kinds]: layers of each kind, and those that run forward again
    """

    def __init__(self, inventory: Inventory, own: Shares) -> None:
        self.setting = inventory.setting
        self.own = own
        self.plans = own.plans
        self.model = self.setting.model
        self.rules = self.setting.profile.traffic
        self.dtype = self.setting.recipe.activation
        self.tokens = own.plans.tokens(self.setting.workload.seq)
        self.batches = own.plans.num_microbatches[:, None]
        self.layers = [block for _, block in inventory.layers]
        self.blocks = own.counts[:, :, [slot for slot, _ in inventory.layers]]
        self.again = inventory.recomputed(own.plans, own.counts)
        self.losses = inventory.losses(own.counts)
        at = own.table.at
        self.first = (own.counts[:, :, at.embedding] > 0).astype(np.int64)
        self.last = (own.counts[:, :, at.final] > 0).astype(np.int64)

    def hidden_bytes(self) -> IntArray:
        """[plans, 1]: bytes of X."""
        return bytes_of(self.tokens * self.model.hidden_size, self.dtype)[:, None]

    def also(self, selected: bool) -> IntArray:
        """[plans, rows, kinds]: layers that run forward again, all of them where a part of each is `selected`."""
        return self.again + self.blocks * int(selected)
