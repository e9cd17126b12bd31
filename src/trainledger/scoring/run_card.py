"""The card that a measured run ran on, by the words of its row."""

from __future__ import annotations

import re
from functools import lru_cache

from trainledger.errors import UnknownName
from trainledger.facts.cluster import Accelerator, accelerator_names, find_accelerator
from trainledger.scoring.cells import Cells

GB = 10**9
SPREAD_BYTES = 8 * GB
"""How far the memory that a row states may be from a card's name plate: GB and GiB, or what a driver leaves."""


def card_of(cells: Cells) -> Accelerator | None:
    """The card called `gpu`, of several sizes the one with the memory that the row states; None where none is known.

    >>> card_of(Cells({"gpu": "A100-SXM", "gpu_mem_gb": "40"})).name
    'A100-SXM4-40GB'
    """
    name, stated = cells.words("gpu"), cells.whole("gpu_mem_gb")
    if not name:
        return None
    found = _named(name)
    if stated is None or (found is not None and _has(found, stated)):
        return found
    same = [card for card in _cards() if _first(card.name) == _first(name) and _has(card, stated)]
    return min(same, key=lambda card: _apart(card, name, stated), default=found)


def _first(name: str) -> str:
    """The letters and digits that a name begins with: of A100-SXM4-80GB, a100."""
    match = re.match(r"[a-z]*[0-9]+", name.lower())
    return match[0] if match else ""


def _apart(card: Accelerator, name: str, stated_gb: int) -> tuple[int, int]:
    """How unlike a card is to what a row says: words of its name that are missing, then bytes."""
    missing = sum(word not in card.name.lower() for word in re.findall(r"[a-z]{3,}", name))
    return missing, abs(card.nominal_bytes - stated_gb * GB)


def _named(name: str) -> Accelerator | None:
    try:
        return find_accelerator(name)
    except UnknownName:
        return None


def _has(card: Accelerator, stated_gb: int) -> bool:
    return abs(card.nominal_bytes - stated_gb * GB) <= SPREAD_BYTES


@lru_cache(maxsize=1)
def _cards() -> tuple[Accelerator, ...]:
    return tuple(find_accelerator(name) for name in accelerator_names())
