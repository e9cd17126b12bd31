"""The first step: an optimizer that makes its moments when it first needs them leaves a lower peak until then.

Whoever reads a meter after one step reads less than the run will hold.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainledger.account.memory.outside.line import Outside
from trainledger.account.memory.reserved.allocator import replay
from trainledger.account.memory.reserved.replay import events_of
from trainledger.account.memory.stage import StageMemory
from trainledger.account.shares import Shares
from trainledger.account.states import buffer_bytes, on_host, standing
from trainledger.arrays import IntArray
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Plans


def first_step(inventory: Inventory, own: Shares, stages: StageMemory) -> Iterator[Outside]:
    """What is allocated before a single plan has moments, and what meters read after its first step."""
    source, moments = inventory.setting.profile.memory.first_step, _moments(inventory, own)
    if not source or not moments.any():
        return
    totals = np.stack([stages.total(index)[0] for index in range(len(stages.places))])
    without = np.array([place.states != "step" for place in stages.places])[:, None] & (totals > 0)
    place, row = (
        int(at) for at in np.unravel_index(int(np.where(without, totals - moments, 0).argmax()), totals.shape)
    )
    later, gone = int(totals[place, row]), int(moments[row])
    stepping = int(np.where(without, 0, totals).max())
    yield _line(
        "first forward and backward",
        later - gone,
        f"{later} B in the {stages.places[place].label} later, less {gone} B of moments, which the first step makes",
        source,
    )
    yield _line(
        "first step, allocated",
        max(later - gone, stepping),
        f"the larger of {later - gone} B before moments exist and {stepping} B in the optimizer step",
        source,
    )
    if not inventory.setting.model.states_alone:
        yield _line(
            "first step, reserved",
            _reserved(inventory, own.plans, row),
            "what the allocator has taken when one step is replayed; later steps hold the moments from their beginning",
            source,
        )


def _line(what: str, amount: int, formula: str, source: str) -> Outside:
    return Outside(
        what=what,
        when="first step",
        place="device",
        per="rank",
        amount=amount,
        basis="modelled",
        formula=formula,
        cites=(source,),
    )


def _reserved(inventory: Inventory, plans: Plans, row: int) -> int:
    """On one stage: what a meter of the allocator reads when it is read after one step."""
    expandable = inventory.setting.allocator(int(plans.gpus[0])) == "expandable"
    return replay(events_of(inventory, plans, row, steps=1), expandable=expandable).max_reserved


def _moments(inventory: Inventory, own: Shares) -> IntArray:
    """[rows]: bytes on the device of moments that the first step makes."""
    total = np.zeros_like(own.pp_stage[0])
    for buffer in inventory.buffers:
        made_early = buffer.row.dtype != "moments" or buffer.row.eager
        if made_early or not standing(own, buffer)[1] or on_host(buffer, inventory.setting.offload_moves):
            continue
        total = total + buffer_bytes(own, buffer)[0]
    return total
