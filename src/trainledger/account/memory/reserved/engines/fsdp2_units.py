"""The units of FSDP2 on one stage, with the bytes of what each gathers and reduces."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from trainledger.account.memory.engines.fsdp2 import Fsdp2
from trainledger.account.memory.reserved.engines.fsdp2 import Unit
from trainledger.account.memory.reserved.run import Layer
from trainledger.account.traffic.units import experts_apart
from trainledger.dtypes import bits, bytes_of
from trainledger.inventory.buffers import Buffer, gathered_bytes
from trainledger.inventory.tensors import BoolArray


def asked_for(buffer: Buffer) -> bool:
    """Whether a row of the states table is among what a run of units asks for: gathered weights, and all gradients."""
    return buffer.row.passing or buffer.row.category == "gradients" or buffer.row.dtype == "gathered"


def units_of(passing: Fsdp2, row: int, layers: Sequence[Layer]) -> dict[int, tuple[Unit, ...]]:
    """Key of each layer of a stage of a single plan -> its units, those of experts with ranks of their own last.

    The ends are one unit where they are gathered together, and both layers name it.
    """
    own, at, table = passing.own, passing.own.table.at, passing.own.table
    counts = own.counts[0, row]
    together = bool(passing.together and counts[at.embedding] and counts[at.final])
    dropped = bool(passing.drops[0, 0])
    apart = bool(experts_apart(own.plans)[0])
    in_ends = np.isin(table.slots, [at.embedding, at.final])
    root = _unit(passing, in_ends, kept=not dropped or passing.keeps_ends, at_end=True) if together else None
    if root is not None:
        root = dataclasses.replace(root, tied=passing.inventory.setting.model.tied)
    last_block = max((layer.key for layer in layers if layer.slots and 0 < layer.slots[0] < at.final), default=-1)
    last_kept = passing.inventory.setting.profile.memory.last_block_kept
    alike: dict[tuple[int, ...], list[Unit]] = {}
    of: dict[int, tuple[Unit, ...]] = {}
    for layer in layers:
        if root is not None and layer.slots and layer.slots[0] in (at.embedding, at.final):
            of[layer.key] = (root,)
        elif layer.slots:
            if layer.slots not in alike:
                members = np.isin(table.slots, layer.slots)
                parts = [members & ~table.expert, members & table.expert] if apart else [members]
                ends = passing.keeps_ends and layer.slots[0] == at.final
                kept, at_end = not dropped or ends, layer.slots[0] == at.embedding
                alike[layer.slots] = [_unit(passing, part, kept=kept, at_end=at_end) for part in parts if part.any()]
            stays = last_kept and layer.key == last_block
            of[layer.key] = tuple(dataclasses.replace(unit, kept=unit.kept or stays) for unit in alike[layer.slots])
    return of


def size_of(count: int, dtype: str) -> int:
    """Bytes of so many elements."""
    return int(bytes_of(np.array([count]), dtype)[0])


def _unit(passing: Fsdp2, members: BoolArray, *, kept: bool, at_end: bool) -> Unit:
    own, setting = passing.own, passing.inventory.setting
    table = own.table
    elements = passing.elements * members
    over = int(own.over(1)[bool(table.expert[members].all())][0])
    gathered = setting.dtype("gathered")
    weights = gathered_bytes(table, elements, gathered)[0]
    trained = int((elements * table.trainable)[0].sum())
    reduce, grad = setting.dtype("reduce"), setting.dtype("grad")
    # what is on the host is copied as it is kept, and cast on the card
    frozen = int(gathered_bytes(table, elements * ~table.trainable, gathered)[0].sum())
    copied = (size_of(trained, setting.dtype("weight")) + frozen) // over * passing.away

    return Unit(
        weights=tuple(int(nbytes) for nbytes in weights[members]),
        cast=(0 if gathered == setting.dtype("weight") else int(weights.sum()) // over) + copied,
        alone=over == 1,
        widens=max(bits(reduce) // bits(setting.recipe.activation), 1),
        reduced=size_of(trained, reduce),
        shard=size_of(trained // over, reduce),
        cast_shard=0 if grad == reduce else size_of(trained // over, grad),
        kept=kept,
        at_end=at_end,
        away=passing.away,
    )
