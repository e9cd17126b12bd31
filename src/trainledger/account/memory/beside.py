"""What a process takes of its card that PyTorch's allocator does not know: the context and the communicators."""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np

from trainledger.arrays import IntArray
from trainledger.facts.load import DATA, load_toml
from trainledger.inventory.inventory import Inventory
from trainledger.lines import Basis
from trainledger.plans.plan import Plans
from trainledger.units import parse_quantity


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the device meter that no tensor is; formula: how its amount comes about."""

    what: str
    amount: int
    formula: str
    lower: int
    upper: int
    basis: Basis
    cite: str


class _Context(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    estimate: str
    lower: str
    upper: str
    basis: Basis
    cite: str


class _Communicator(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    two: str
    more: str
    basis: Basis
    cite: str
    first: str = ""


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    context: dict[str, _Context]
    communicator: dict[str, _Communicator]


@lru_cache(maxsize=1)
def _table() -> _Table:
    return msgspec.convert(load_toml(DATA / "measured" / "meters.toml"), _Table)


def beside(inventory: Inventory, plans: Plans, plan: int = 0) -> tuple[Beside, ...]:
    """What a process takes of the card that PyTorch's allocator does not know; nothing in an accounting on paper."""
    if not inventory.setting.profile.memory.device:
        return ()
    context, each = _context(inventory), _communicator(inventory)
    opened = communicators(inventory, plans.take(slice(plan, plan + 1)))
    groups = ", ".join(f"{name} of {ranks[0]}" for name, ranks in opened.items() if ranks[0] > 1)
    total = int(_opened_bytes(each, opened)[0])
    return (
        Beside(
            what="context",
            amount=_bytes(context.estimate),
            formula=f"one process, with the kernels of its libraries; measured from {context.lower} to {context.upper}",
            lower=_bytes(context.lower),
            upper=_bytes(context.upper),
            basis=context.basis,
            cite=context.cite,
        ),
        Beside(
            what=f"communicators: {groups or 'none'}",
            amount=total,
            formula=_opened_words(each, [int(ranks[0]) for ranks in opened.values() if ranks[0] > 1]),
            lower=total,
            upper=total,
            basis=each.basis,
            cite=each.cite,
        ),
    )


def beside_bytes(inventory: Inventory, plans: Plans) -> IntArray:
    """[plans]: the sum of `beside`."""
    if not inventory.setting.profile.memory.device:
        return np.zeros(len(plans), dtype=np.int64)
    opened = communicators(inventory, plans)
    return _bytes(_context(inventory).estimate) + _opened_bytes(_communicator(inventory), opened)


def communicators(inventory: Inventory, plans: Plans) -> dict[str, IntArray]:
    """Group -> ranks [plans] of each communicator that a rank opens, where more than one.

    Every axis has one, and the world; others are an engine's own. The tied ones, and neighbours, are those of a rank at
    an end of the pipeline.
    """
    pair = np.minimum(plans.pp, 2)
    more = {"model": plans.tp * plans.pp, "tied": pair if inventory.setting.model.tied else pair * 0, "neighbour": pair}
    axes = {
        "world": plans.gpus,
        "dp_shard": plans.dp_shard * plans.cp,
        "dp_replicate": plans.dp_replicate,
        "tp": plans.tp,
        "cp": np.where(plans.dp_shard > 1, plans.cp, 1),
        "pp": plans.pp,
        "ep": plans.ep,
    }
    return axes | {name: more[name] for name in inventory.setting.profile.memory.communicators}


def _context(inventory: Inventory) -> _Context:
    return _table().context[inventory.setting.profile.memory.beside or "any"]


def _communicator(inventory: Inventory) -> _Communicator:
    card = inventory.setting.accelerator
    vendor = "rocm" if card is not None and card.vendor == "amd" else "cuda"
    return _table().communicator[inventory.setting.profile.memory.beside or vendor]


def _opened_bytes(each: _Communicator, opened: dict[str, IntArray]) -> IntArray:
    sizes = np.stack(list(opened.values()))
    two, more = _bytes(each.two), _bytes(each.more)
    total = two * (sizes == 2).sum(axis=0) + more * (sizes > 2).sum(axis=0)
    if each.first:
        world = opened["world"]
        total = total + (world > 1) * (_bytes(each.first) - np.where(world == 2, two, more))
    return total


def _opened_words(each: _Communicator, ranks: list[int]) -> str:
    """How many communicators of which size, those of these many ranks; the world comes first.

    >>> _opened_words(_Communicator("544 MiB", "688 MiB", "calibrated", "nccl-964"), [8, 8, 2])
    '2 communicators of 688 MiB, 1 between two ranks of 544 MiB'
    """
    found: list[str] = []
    if each.first and ranks:
        found, ranks = [f"the first communicator of {each.first}"], ranks[1:]
    pairs = 0 if each.two == each.more else ranks.count(2)
    if wide := len(ranks) - pairs:
        found.append(
            f"{wide} {'more' if each.first else 'communicators' if wide > 1 else 'communicator'} of {each.more}"
        )
    if pairs:
        found.append(f"{pairs} between two ranks of {each.two}")
    return ", ".join(found) or "one rank opens none"


@lru_cache(maxsize=8)
def _bytes(text: str) -> int:
    return parse_quantity(text, "byte")
