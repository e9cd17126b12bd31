"""All traffic of a step: data- and model-parallel collectives of every stage, and their totals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from trainledger.account.shares import Shares, shares
from trainledger.account.states import COLUMNS
from trainledger.account.traffic.collectives import Collective
from trainledger.account.traffic.data import data_traffic
from trainledger.account.traffic.model import model_traffic
from trainledger.arrays import FloatArray, IntArray, one_of, stacked
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Plans

Part = Callable[[Inventory, Shares], list[Collective]]
MODEL_COLUMNS = ("tp", "sp", "pp", "vpp", "cp", "ep", "etp", "mbs", "num_microbatches")


def all_traffic(inventory: Inventory, own: Shares) -> list[Collective]:
    """Every collective row by row, nothing factorised: what one plan's ledger prints."""
    return [*data_traffic(inventory, own), *model_traffic(inventory, own)]


def wire_totals(inventory: Inventory, plans: Plans) -> tuple[IntArray, FloatArray, FloatArray]:
    """([plans, rows] pp_stage, [plans, rows] data-parallel, [plans, rows] model-parallel wire bytes per step).

    Each part is computed on the distinct combinations of the columns it depends on, then gathered.
    """
    # where gradients are reduced once per step, however many micro-batches, those are no column
    each = one_of(plans.zero_stage, (0, 2, 3) if inventory.setting.profile.traffic.replicas_by_unit else (2, 3), 4)
    once = dataclasses.replace(plans, num_microbatches=np.where(each, plans.num_microbatches, 1))
    distinct, index = once.distinct(COLUMNS)
    staged, place = distinct.by_zero_stage()
    data = stacked([_wire(data_traffic, inventory, shares(inventory, part)) for part in staged])[place[index]]
    distinct, index = plans.distinct(_model_columns(inventory))
    own = shares(inventory, distinct)
    return own.pp_stage[index], data, _wire(model_traffic, inventory, own)[index]


def _model_columns(inventory: Inventory) -> tuple[str, ...]:
    """What model-parallel traffic depends on: a gradient that is summed shard by shard, on its shards too."""
    table, rules = inventory.table, inventory.setting.profile.traffic
    shards = rules.reduces_partial or (rules.shards_embedding and bool((table.slots == table.at.copy).any()))
    return (*MODEL_COLUMNS, "dp_shard", "zero_stage") if shards else MODEL_COLUMNS


def _wire(part: Part, inventory: Inventory, own: Shares) -> FloatArray:
    """[plans, rows]: what all collectives of a part send."""
    total = np.zeros(own.pp_stage.shape)
    for call in part(inventory, own):
        total += call.wire_bytes()
    return total
