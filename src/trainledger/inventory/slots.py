"""Where in a model a tensor stands: what stages count and tensors belong to."""

from __future__ import annotations

import msgspec

from trainledger.facts.model import Model


class Slots(msgspec.Struct, frozen=True):
    """The slots of a model beside its distinct blocks, which have 1 to `final` - 1.

    final   what follows the last block
    copy    the embedding that the last pipeline stage keeps again: tied, or under multi-token prediction
    mtp     one multi-token-prediction depth
    count   how many slots there are
    """

    embedding: int
    final: int
    copy: int
    mtp: int
    count: int


def slots_of(model: Model) -> Slots:
    """The slots of a model.

    >>> from trainledger.facts.presets import load_preset
    >>> slots_of(load_preset("llama-3-8b"))
    Slots(embedding=0, final=2, copy=3, mtp=4, count=5)
    """
    blocks = len(model.blocks)
    return Slots(embedding=0, final=blocks + 1, copy=blocks + 2, mtp=blocks + 3, count=blocks + 4)
