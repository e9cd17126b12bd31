"""Dense tensors or routed experts of all plans: their masks, groups and shard sizes, and calls over those groups."""

from __future__ import annotations

import numpy as np

from trainledger.account.shares import Shares, shares_elements
from trainledger.account.traffic.collectives import Collective, Op, collective, summed
from trainledger.arrays import IntArray, one_of
from trainledger.inventory.inventory import Inventory
from trainledger.inventory.tensors import BoolArray
from trainledger.plans import sharding
from trainledger.profiles.profile import Cut


class Side:
    """Dense tensors or routed experts: their masks, groups and shard sizes."""

    def __init__(self, inventory: Inventory, own: Shares, *, expert: bool) -> None:
        table = own.table
        chosen = table.expert if expert else ~table.expert
        self.setting = inventory.setting
        self.own = own
        self.plans = own.plans
        self.expert = expert
        self.trained: BoolArray = chosen & table.trainable
        self.all: BoolArray = chosen
        self.name = "expert_dp" if expert else "dp"
        self.shard_name = "expert_dp_shard" if expert else "dp_shard"
        self.group = sharding.expert_group(own.plans) if expert else sharding.dense_group(own.plans)
        self.shard = own.expert if expert else own.dense
        self.replicas = own.plans.dp_replicate
        self.stage = self.plans.zero_stage
        self.batches = self.plans.num_microbatches[:, None]

    def whole(self, mask: BoolArray, cut: Cut) -> IntArray:
        """[plans, rows]: elements of the padded whole, a multiple of the shard group."""
        return shares_elements(self.own, mask, cut) * self.shard[:, None]

    def units(self, mask: BoolArray) -> IntArray:
        """[plans, rows]: separately gathered units of the masked tensors: blocks, embedding, what follows the last."""
        return self.own.times(mask)

    def once(self, *stages: int) -> IntArray:
        """[plans, 1]: 1 under the named zero_stages."""
        return one_of(self.stage, stages, 4)[:, None].astype(np.int64)

    def calls(self, op: Op, what: str, dtype: str, count: IntArray, size: IntArray, cite: str) -> Collective:
        """Over the sharding ranks for gathers and scatters, over all averaging ranks for all-reduces."""
        if op == "all_reduce":
            return collective("all_reduce", self.name, what, dtype, self.group, count, size, cite)
        return collective(op, self.shard_name, what, dtype, self.shard, count, size, cite)

    def across(self, dtype: str, count: IntArray, total: IntArray, cite: str) -> Collective:
        """The all-reduce of shards over their replicas (HSDP, several optimizer instances); `total` is of the whole."""
        shards = total // self.shard[:, None]
        what = "gradient shards of experts" if self.expert else "gradient shards"
        return summed("all_reduce", "dp_replicate", what, dtype, self.replicas, count, shards, cite)

    def fixed(self, op: Op, what: str, dtype: str, count: IntArray, total: IntArray, cite: str) -> Collective:
        """Calls that differ in size, over the sharding ranks; `total` bytes of the whole side of all of them."""
        return summed(op, self.shard_name, what, dtype, self.shard, count, total, cite)

    def averaged(self, what: str, dtype: str, count: IntArray, total: IntArray, cite: str) -> Collective:
        """All-reduces that differ in size, over all ranks that average."""
        return summed("all_reduce", self.name, what, dtype, self.group, count, total, cite)
