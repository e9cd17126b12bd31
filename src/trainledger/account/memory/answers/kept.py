"""What waits for its backward, in words: layers, micro-batches in flight, and what is not of them."""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.account.memory.layers import on_card, regions
from trainledger.account.memory.stage import StageMemory
from trainledger.inventory.blocks import parts_of
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Plans
from trainledger.schedules import find_schedule

ENDS = "the embedding, losses and boundary tensors"


def kept_words(inventory: Inventory, plans: Plans, stages: StageMemory, index: int, row: int) -> str:
    """How the bytes that wait at a place of a stage of a single plan come about."""
    place = stages.places[index]
    if place.part in ("end", "none"):
        return "boundary tensors that are received, and what stands for the whole run"
    layers = list(_layers(inventory, plans, row))
    schedule = find_schedule(inventory.setting.scenario.schedule)
    chunks = int(schedule.in_flight(plans, stages.pp_stage)[0, row])
    vpp = int(plans.vpp[0])
    whole = -(-sum(count * each for count, each in layers) // vpp) * chunks
    kept = " + ".join(f"{count} {'layer' if count == 1 else 'layers'} x {each:,} B" for count, each in layers)
    if len(layers) > 1 or vpp > 1:
        kept = f"({kept})" + (f" / {vpp} chunks of a stage" if vpp > 1 else "")
    what = ("chunk" if vpp > 1 else "micro-batch") + ("" if chunks == 1 else "s" if vpp > 1 else "es")
    return f"{chunks} {what} in flight x {kept}{_rest(int(place.kept[0, row]) - whole)}"


def _layers(inventory: Inventory, plans: Plans, row: int) -> Iterator[tuple[int, int]]:
    """(layers of a stage, bytes that each keeps) of every kind that it has."""
    parts, counts = parts_of(inventory, plans), inventory.stage_counts(plans)[0]
    again, vpp = inventory.recomputed(plans), plans.vpp[:, None]
    for index, ((slot, _), tape) in enumerate(zip(inventory.layers, parts.blocks, strict=True)):
        count = int(on_card(inventory.setting, regions(counts[:, :, slot], vpp, parts.region))[0, row])
        chosen = int(again[0, row, index]) if parts.between else count
        if chosen:
            yield chosen, int(tape.saved[0])
        if count > chosen:
            yield count - chosen, int(parts.between[index].saved[0])


def _rest(more: int) -> str:
    """What is more, or less, than layers keep.

    >>> _rest(-4096)
    ' - 4,096 B: layers that run, have yet to or no longer wait, less the embedding, losses and boundary tensors'
    """
    if more < 0:
        return f" - {-more:,} B: layers that run, have yet to or no longer wait, less {ENDS}"
    return f" + {more:,} B: {ENDS}, less the layer that runs" if more else ""
