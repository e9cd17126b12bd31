"""What the meters of a card read: allocated, reserved, device.

allocated   what PyTorch's tensors hold at the highest place of a step, on the stage that holds most
reserved    what its caching allocator has taken from the card for them (reserved/allocator.py)
device      that, the context and the communicators: what nvidia-smi shows of the process
"""

from __future__ import annotations

from collections import Counter

import msgspec

from trainledger.account.memory.beside import Beside, beside, beside_bytes
from trainledger.account.memory.bounds import bounds
from trainledger.account.memory.reserved.replay import reserved_of
from trainledger.account.memory.stage import StageMemory, stage_memory
from trainledger.facts.model import routed
from trainledger.inventory.inventory import Inventory
from trainledger.inventory.tape.tape import Kind
from trainledger.plans.plan import Plans
from trainledger.profiles.profile import CATEGORIES

METERS = ("allocated", "reserved", "device")


class Meter(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a meter reads; the interval is what residuals of the same engine and meter have been (residuals)."""

    estimate: int
    lower: int
    upper: int


class Alive(msgspec.Struct, frozen=True, kw_only=True):
    """A storage that is alive where most is held, or the sum of several alike; category is a word of line ids.

    name       no two of one place have the same
    storages   how many alike, of amount / storages bytes each; 0 of a sum of unlike ones
    """

    name: str
    kind: str
    category: str
    amount: int
    storages: int = 0


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """The meters of one plan, where most is allocated, and what is alive there, largest first."""

    meters: dict[str, Meter]
    pp_stage: int
    place: str
    instant: str
    alive: tuple[Alive, ...]
    beside: tuple[Beside, ...]


def memory_of(inventory: Inventory, plans: Plans, stages: StageMemory | None = None) -> Memory:
    """The meters of a Plans of length one; `stages` where they are known already."""
    if stages is None:
        stages = stage_memory(inventory, plans)
    index, row = stages.where()
    place = stages.places[index]
    return Memory(
        meters=_meters(inventory, plans, int(stages.total(index)[0, row])),
        pp_stage=int(stages.pp_stage[0, row]),
        place=place.label,
        instant=place.states,
        alive=alive_at(stages, index, row),
        beside=beside(inventory, plans),
    )


def device_bytes(inventory: Inventory, plans: Plans, *, usable: int | None = None) -> int:
    """What the device meter shows of a Plans of length one; in an accounting on paper, what is allocated.

    For many plans StageMemory.device is a lower bound of it: it knows nothing of what the allocator reserves beside.
    Where all that is asked is whether `usable` bytes hold the plan, more than those may be any amount that is more.
    """
    if not inventory.setting.profile.memory.device or inventory.setting.model.states_alone:
        return int(stage_memory(inventory, plans).device[0])
    least, outside = int(stage_memory(inventory, plans).device[0]), int(beside_bytes(inventory, plans)[0])
    if usable is not None and least > usable:
        return least
    return max(_reserved(inventory, plans, None if usable is None else max(usable - outside, 0)) + outside, least)


def _reserved(inventory: Inventory, plans: Plans, enough: int | None = None) -> int:
    expandable = inventory.setting.allocator(int(plans.gpus[0])) == "expandable"
    return reserved_of(inventory, plans, expandable=expandable, enough_bytes=enough).max_reserved


def _meters(inventory: Inventory, plans: Plans, allocated: int) -> dict[str, Meter]:
    """What is reserved is what a replay of the step's requests asks for; an accounting on paper has one meter.

    Of a model whose states alone are known, nothing is known of what its allocator reserves.
    """
    more = uneven_bytes(inventory, plans, allocated)
    meters = {"allocated": _meter(inventory, "allocated", allocated, more)}
    extra = beside(inventory, plans)
    if extra:
        under = meters["allocated"]
        if not inventory.setting.model.states_alone:
            reserved = _meter(inventory, "reserved", max(_reserved(inventory, plans), allocated), more)
            # what is allocated is reserved: the two meters' own residuals do not know that
            lower = max(reserved.lower, under.lower)
            under = meters["reserved"] = msgspec.structs.replace(reserved, lower=lower)
        meters["device"] = Meter(
            estimate=under.estimate + sum(line.amount for line in extra),
            lower=under.lower + sum(line.lower for line in extra),
            upper=under.upper + sum(line.upper for line in extra),
        )
    return meters


def _meter(inventory: Inventory, name: str, estimate: int, more: int) -> Meter:
    lower, upper = bounds(inventory.setting.profile.name, name, estimate)
    return Meter(estimate=estimate, lower=lower, upper=upper + more)


def uneven_bytes(inventory: Inventory, plans: Plans, allocated: int) -> int:
    """What more is allocated where all tokens choose experts of one rank; 0 where routing is said, or cannot matter."""
    setting = inventory.setting
    if setting.scenario.routing or int(plans.ep[0]) == 1 or not routed(setting.model):
        return 0
    worst = stage_memory(Inventory(setting.under(routing="worst")), plans)
    return max(int(worst.allocated[0]) - allocated, 0)


def alive_at(stages: StageMemory, index: int, row: int) -> tuple[Alive, ...]:
    """What is alive at a place of a stage of a single plan, largest first; the sum is what is allocated there."""
    place, to_come = stages.places[index], stages.to_come(index)
    states = {category: stages.states.held[category, place.states] for category in CATEGORIES}
    states["gradients"] = states["gradients"] - to_come
    found = [Alive(name=c, kind="states", category=c, amount=int(amount[0, row])) for c, amount in states.items()]
    sums = (
        ("saved for backward", "saved", "activations", place.kept),
        ("gathered and on its way", "passing", "buffers", stages.passing[index] + to_come),
        *(() if place.tape is not None else (("gradients handed on", "gradient", "activations", place.walked),)),
    )
    found += [Alive(name=n, kind=k, category=c, amount=int(amount[0, row])) for n, k, c, amount in sums]
    found.append(Alive(name="workspaces", kind="workspace", category="buffers", amount=stages.workspace_bytes))
    if place.tape is not None and place.tape.instants and place.at is not None:
        found += _walked(place.tape.at(int(place.at[0])), int(place.walked[0, row]))
    return tuple(sorted((entry for entry in found if entry.amount), key=lambda entry: -entry.amount))


def _walked(alive: list[tuple[str, Kind, int]], total: int) -> list[Alive]:
    """The storages of the layer that runs; gradients of weights where they lie beside the rest."""
    if sum(amount for _, _, amount in alive) > total:
        alive = [entry for entry in alive if entry[1] != "weight gradient"]
    names: set[str] = set()
    return [
        Alive(name=_apart(name, names), kind=kind, category="activations", amount=count * amount, storages=count)
        for (name, kind, amount), count in Counter(alive).items()
    ]


def _apart(name: str, taken: set[str]) -> str:
    """A name that no other has: storages of one name that are not alike are told apart.

    >>> taken = {"input"}
    >>> _apart("input", taken), _apart("input", taken), _apart("output", taken)
    ('input, another', 'input, another 2', 'output')
    """
    found, number = name, 1
    while found in taken:
        found = f"{name}, another" + (f" {number}" if number > 1 else "")
        number += 1
    taken.add(found)
    return found
