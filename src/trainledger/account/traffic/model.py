"""Model-parallel traffic of one optimizer step: tensor, context, expert and pipeline parallelism.

X is one hidden tensor of a micro-batch on one rank, (seq / cp) x mbs x hidden elements.
"""

from __future__ import annotations

from trainledger.account.shares import Shares
from trainledger.account.traffic.collectives import Collective
from trainledger.account.traffic.context import context_traffic
from trainledger.account.traffic.experts import expert_traffic
from trainledger.account.traffic.pipeline import pipeline_traffic, shared_weights
from trainledger.account.traffic.step import Step
from trainledger.account.traffic.tensor import tensor_traffic
from trainledger.inventory.inventory import Inventory


def model_traffic(inventory: Inventory, own: Shares) -> list[Collective]:
    """Every collective of the model-parallel axes."""
    if inventory.setting.model.params_only:
        return []
    step = Step(inventory, own)
    parts = (tensor_traffic, context_traffic, expert_traffic, pipeline_traffic, shared_weights)
    return [call for part in parts for call in part(step)]
