"""One storage of a plan, or as many as there are of a size: what storages.py and storages_weights.py list."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from trainledger.account.shares import Shares
from trainledger.dtypes import bits

Family = Literal[
    "logits", "scores", "activations", "weights", "gradients", "optimizer", "buffers", "gathered", "bucket", "copies"
]


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """One storage, or as many of one size and name as there are.

    amount      bytes of one
    pp_stages   pipeline stages that make it
    phase       when it is made
    formula     the amount in words
    per_token   bytes for each token of a micro-batch on one rank; 0: no matter of tokens
    in_plan     the plan as given makes it
    place       device or host memory
    """

    name: str
    family: Family
    amount: int
    pp_stages: tuple[int, ...]
    phase: str
    formula: str
    per_token: int = 0
    in_plan: bool = True
    place: Literal["device", "host"] = "device"


def otherwise(
    name: str, family: Family, amount: int, stages: tuple[int, ...], phase: str, formula: str, per_token: int = 0
) -> Stored:
    """One that the plan as given does not make."""
    return Stored(
        name=name,
        family=family,
        amount=amount,
        pp_stages=stages,
        phase=phase,
        formula=formula,
        per_token=per_token,
        in_plan=False,
    )


def having(own: Shares, slots: Iterable[int]) -> tuple[int, ...]:
    """The pipeline stages that hold one of these slots."""
    chosen = own.counts[0][:, list(slots)].sum(axis=1) > 0
    return tuple(sorted({int(stage) for stage in own.pp_stage[0][chosen]}))


def bytes_in(count: int, dtype: str) -> int:
    """Bytes of so many elements.

    >>> bytes_in(3, "bf16"), bytes_in(3, "nf4")
    (6, 2)
    """
    return -(-count * bits(dtype) // 8)
