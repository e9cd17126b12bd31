"""What the meters of a card read: allocated, reserved, device.

allocated   what PyTorch's tensors hold at the highest place of a step, on the stage that holds most
reserved    what its caching allocator has taken from the card for them (allocator.py)
device      that, the context and the communicators: what nvidia-smi shows of the process
"""

from __future__ import annotations

import msgspec

from trainledger.account.memory.beside import Beside, beside
from trainledger.account.memory.stage import StageMemory, stage_memory
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Plans

METERS = ("allocated", "reserved", "device")


class Meter(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a meter reads; the interval is what residuals of the same engine and meter have been (residuals)."""

    estimate: int
    lower: int
    upper: int


class Alive(msgspec.Struct, frozen=True, kw_only=True):
    """A storage, or a sum of alike ones, that is alive where most is held."""

    name: str
    kind: str
    amount: int


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """The meters of one plan, where most is allocated, and what is alive there, largest first."""

    meters: dict[str, Meter]
    pp_stage: int
    place: str
    instant: str
    alive: tuple[Alive, ...]
    beside: tuple[Beside, ...]


def memory_of(inventory: Inventory, plans: Plans, *, simulate: bool = True) -> Memory:
    """The meters of a Plans of length one; `simulate`: with the model of the allocator, which takes longer."""
    stages = stage_memory(inventory, plans)
    index, row = stages.where()
    place = stages.places[index]
    allocated = int(stages.total(index)[0, row])
    extra = beside(inventory, plans)
    del simulate
    more = sum(line.amount for line in extra)
    return Memory(
        meters={
            "allocated": Meter(estimate=allocated, lower=allocated, upper=allocated),
            "device": Meter(estimate=allocated + more, lower=allocated, upper=allocated + more),
        },
        pp_stage=int(stages.pp_stage[0, row]),
        place=place.label,
        instant=place.states,
        alive=alive_at(stages, index, row),
        beside=extra,
    )


def alive_at(stages: StageMemory, index: int, row: int) -> tuple[Alive, ...]:
    """What is alive at a place of a stage of a single plan, largest first; the sum is what is allocated there."""
    place = stages.places[index]
    found = [
        Alive(name=category, kind="states", amount=int(stages.states.held[category, place.states][0, row]))
        for category in ("weights", "gradients", "optimizer", "buffers")
    ]
    found.append(Alive(name="saved for backward", kind="activations", amount=int(place.kept[0, row])))
    found.append(Alive(name="gathered and on its way", kind="passing", amount=int(stages.passing[index][0, row])))
    found.append(Alive(name="workspaces", kind="workspace", amount=stages.workspace_bytes))
    if place.tape is not None and place.at is not None:
        instant = int(place.at[0])
        walked = place.tape.at(instant)
        if sum(amount for _, _, amount in walked) > int(place.walked[0, row]):
            walked = [entry for entry in walked if entry[1] != "weight gradient"]
        found += [Alive(name=name, kind=kind, amount=amount) for name, kind, amount in walked]
    else:
        found.append(Alive(name="gradients handed on", kind="gradient", amount=int(place.walked[0, row])))
    return tuple(sorted((entry for entry in found if entry.amount), key=lambda entry: -entry.amount))
