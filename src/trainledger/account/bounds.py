"""How certain a peak is: its bytes by the basis of the lines that hold them."""

from __future__ import annotations

import numpy as np

from trainledger.account.ledger import Peak
from trainledger.account.shares import shares
from trainledger.account.states import alive_at, buffer_bytes, on_host, plan_mask
from trainledger.inventory.inventory import Inventory
from trainledger.lines import BASES, Basis
from trainledger.plans.plan import Plans


def by_basis(inventory: Inventory, plans: Plans, peak: Peak) -> dict[Basis, int]:
    """Device bytes of a single plan at the stage and instant of its peak, by basis; bases that hold nothing left out.

    Activations are alive at the loss alone, and modelled. The values sum to `peak.total_bytes`; what is exact is a
    lower bound of the whole.
    """
    own = shares(inventory, plans)
    where = int(np.argmax(own.pp_stage[0] == peak.pp_stage))
    held: dict[Basis, int] = dict.fromkeys(BASES, 0)
    for buffer in inventory.buffers:
        if on_host(buffer, inventory.setting.offload_moves) or not plan_mask(plans, buffer)[0]:
            continue
        alive = alive_at(buffer, peak.instant, plans)
        if alive is not None and np.any(alive):
            held[buffer.row.basis] += int(buffer_bytes(own, buffer)[0, where])
    if peak.instant == "loss":
        held["modelled"] += peak.activations_bytes
    return {basis: amount for basis, amount in held.items() if amount}
