"""Saved activations and the peak of one rank, predicted beside its exact lines.

Both follow from the operations that PyTorch runs on a CPU, one by one, while an observer looks on. They are modelled:
what a kernel keeps is read in PyTorch's sources, and a release may change it.
"""

from __future__ import annotations

import msgspec

from trainledger.account.memory.rank import RankStep
from trainledger.account.own import RankShares
from trainledger.account.rank import Amount, Prediction
from trainledger.facts.semantics import Semantics
from trainledger.inventory.inventory import Inventory
from trainledger.lines import line_id
from trainledger.plans.plan import Plans

SAVED = line_id("held", "activations", "saved for backward")
PEAK = line_id("held", "peak", "allocated")

SAVED_TOLERANCE, PEAK_TOLERANCE = 0.01, 0.02
"""What a measurement may differ by: a peak lies between two operations, and a thread of the backend may hold a tensor
that has been sent a moment longer."""


def with_memory(
    prediction: Prediction,
    inventory: Inventory,
    plans: Plans,
    rules: Semantics,
    *,
    clips: bool,
    dry: bool,
    emulates: bool = True,
) -> Prediction:
    """The prediction of a rank of a Plans of length one with its saved activations and its peak.

    rules     of the model's forward pass
    dry       the run is a dry one: tokens are routed evenly, and requests hold nothing that they send
    emulates  products in FP8 are known to be emulated, for the rank computes on a CPU

    Where a router decides how many tokens a rank's experts get, any measurement agrees; so it does with the peak of a
    rank that may multiply in FP8 as no CPU does.
    """
    of = RankShares(inventory, plans, prediction.rank)
    rest = sum(amount.amount for amount in prediction.held["rest"].values())
    found = RankStep(of, rules, rest, clips=clips, dry=dry).run()
    routed = of.plan["ep"] > 1 and not dry
    open_peak = routed or (inventory.setting.recipe.fp8 and not emulates)
    lines = {PEAK: _modelled(found.peak, f"most alive: {found.where}", None if open_peak else PEAK_TOLERANCE)}
    if found.saved is not None:
        lines[SAVED] = _modelled(found.saved, "alive after the last loss", None if routed else SAVED_TOLERANCE)
    return msgspec.structs.replace(prediction, alive=lines)


def _modelled(amount: int, formula: str, tolerance: float | None) -> Amount:
    return Amount(amount=amount, basis="modelled", formula=formula, tolerance=tolerance)
