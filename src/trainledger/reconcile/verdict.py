"""What a comparison says: one verdict a line, the items that no line claims, and whether the whole is proven."""

from __future__ import annotations

from typing import Literal

import msgspec

from trainledger.lines import Basis

Word = Literal["equal", "differs", "within", "beyond", "reported", "missing"]
"""missing: predicted and not seen. within, beyond: off by less, by more than the tolerance of its prediction. reported:
seen, without a prediction that it would have to meet."""

WRONG: tuple[Word, ...] = ("differs", "beyond", "missing")
"""What a proof may not have."""

Unit = Literal["B", "FLOP", "calls"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of one rank. `predicted` is null where nothing predicts it, `measured` where it was not seen.

    instant   of held lines: rest, loss or backward
    """

    id: str
    rank: int
    predicted: int | None
    measured: int | None
    unit: Unit
    basis: Basis
    verdict: Word
    instant: str = ""


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """Something seen that no line claims.

    what      a storage under no name, a line that was not predicted, or collectives
    op        the operation a storage was born in, the id of a line, or the kind of collective with dtype and group
    phase     in which part of the step it was born; of a line or a collective ""
    shape     of a storage as it was born
    times     storages, lines or calls alike
    bytes     of all of them together; of collectives what was passed in and written
    instants  at which it was held; of collectives none
    """

    rank: int
    what: Literal["storage", "line", "calls"]
    op: str
    phase: str
    dtype: str
    shape: tuple[int, ...]
    times: int
    bytes: int
    instants: tuple[str, ...] = ()


class Unexplained(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes held and collectives issued that nothing predicts."""

    bytes: int
    calls: int
    items: tuple[Item, ...]


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """All lines of all ranks."""

    lines: tuple[Verdict, ...]
    unexplained: Unexplained
    verdict: Literal["proven", "differs"]


def judged(predicted: int, measured: int | None, basis: Basis, tolerance: float | None = None) -> Word:
    """The verdict on one figure; `tolerance` is by how much of the prediction a modelled one may be off.

    >>> judged(4, 4, "exact"), judged(4, 8, "exact"), judged(4, None, "exact"), judged(4, 8, "modelled")
    ('equal', 'differs', 'missing', 'reported')
    >>> judged(100, 102, "modelled", 0.02), judged(100, 97, "modelled", 0.02)
    ('within', 'beyond')
    """
    if measured is None:
        return "missing" if predicted else "equal"
    if basis == "exact":
        return "equal" if predicted == measured else "differs"
    if tolerance is None:
        return "reported"
    return "within" if abs(measured - predicted) <= tolerance * predicted else "beyond"
