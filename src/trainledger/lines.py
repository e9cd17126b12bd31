"""A ledger line, and the grammar of its id.

`kind/category/tensor-or-op[@group]`: kind is `held`, `moved` or `done`; category is a word of docs/vocabulary.md;
the last part is a Hugging Face state-dict name (with `*` for the layer index) or an operation; what is done has no
category. Whatever measures a run imports this module and nothing else, so that the join of predicted and measured
lines needs no translation.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Basis = Literal["exact", "modelled", "calibrated", "assumed"]
BASES: tuple[Basis, ...] = ("exact", "modelled", "calibrated", "assumed")
KINDS = ("held", "moved", "done")

Instant = Literal["rest", "loss", "backward"]
"""When a rank is looked at: between steps; after the loss of the last micro-batch; at the end of its backward, before
the optimizer steps. An engine's profile knows the inside of that step as well."""

CHECKPOINT = "checkpoint: weights and optimizer, each once"
"""What a checkpoint of a run takes: `held/outside/<this>@disk`."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One entry: `amount` in `unit`, how sure it is (`basis`), and where it comes from.

    at_peak   of a held line: the card holds it where the rank holds most
    """

    id: str
    amount: int | float
    unit: Literal["B", "FLOP", "s"]
    basis: Basis
    formula: str = ""
    cites: tuple[str, ...] = ()
    pp_stage: int = 0
    at_peak: bool = False


def line_id(kind: str, category: str, what: str, group: str = "") -> str:
    """Compose an id.

    >>> line_id("held", "weights", "model.layers.*.mlp.up_proj.weight", "dp")
    'held/weights/model.layers.*.mlp.up_proj.weight@dp'
    """
    if kind not in KINDS:
        raise AssertionError(f"line kind {kind!r} is not one of {KINDS}")
    return f"{kind}/{category}/{what}" + (f"@{group}" if group else "")


def done_id(operation: str) -> str:
    """The id of the arithmetic of a kind of operation.

    >>> done_id("matmul")
    'done/matmul'
    """
    return f"done/{operation}"
