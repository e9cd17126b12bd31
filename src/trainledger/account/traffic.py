"""All traffic of a step: data- and model-parallel collectives of every stage, and their totals."""

from __future__ import annotations

import numpy as np

from trainledger.account.collectives import Collective
from trainledger.account.shares import Shares, shares
from trainledger.account.states import COLUMNS
from trainledger.account.traffic_data import data_traffic
from trainledger.account.traffic_model import model_traffic
from trainledger.arrays import FloatArray, IntArray
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Plans

MODEL_COLUMNS = ("tp", "sp", "pp", "vpp", "cp", "ep", "etp", "mbs", "num_microbatches")


def all_traffic(inventory: Inventory, own: Shares) -> list[Collective]:
    """Every collective row by row, nothing factorised: what one plan's ledger prints."""
    return [*data_traffic(inventory, own), *model_traffic(inventory, own)]


def wire_totals(inventory: Inventory, plans: Plans) -> tuple[IntArray, FloatArray, FloatArray]:
    """([plans, rows] pp_stage, [plans, rows] data-parallel, [plans, rows] model-parallel wire bytes per step).

    Each part is computed on the distinct combinations of the columns it depends on, then gathered.
    """
    totals: list[FloatArray] = []
    stage = np.zeros((len(plans), 1), dtype=np.int64)
    for columns, part in ((COLUMNS, data_traffic), (MODEL_COLUMNS, model_traffic)):
        distinct, index = plans.distinct(columns)
        own = shares(inventory, distinct)
        total = np.zeros(own.pp_stage.shape)
        for call in part(inventory, own):
            total += call.wire_bytes()
        stage = own.pp_stage[index]
        totals.append(total[index])
    return stage, totals[0], totals[1]
