"""What one rank owns: its layers by name, and its own share of each tensor, which differs where something is uneven.

Search asks for the fullest rank of each distinct pipeline stage; a proof asks for each rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from trainledger.account.shares import Shares, shares
from trainledger.account.traffic.units import experts_apart
from trainledger.arrays import IntArray, ceil_div, ints
from trainledger.errors import BadInput
from trainledger.inventory.buffers import gathered_parts
from trainledger.inventory.inventory import Inventory
from trainledger.inventory.tensors import BoolArray, LocalShapes, TensorTable
from trainledger.plans import partition
from trainledger.plans.plan import Plans
from trainledger.plans.ranks import Place, place_of
from trainledger.plans.split import chunks_of, compute_costs, layers_of, layers_per_chunk


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One tensor of a rank, before sharding.

    row          its row in the TensorTable
    unit         what it is gathered and reduced with
    rows, rest   its shape here: dimension 0 and the product of the others; of one member, if it is a stack
    copies       members of the stack here; 0: no stack
    """

    row: int
    name: str
    unit: str
    rows: int
    rest: int
    copies: int

    @property
    def numel(self) -> int:
        """Elements before sharding."""
        return self.rows * self.rest * max(self.copies, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """How a tensor is divided: elements that this rank holds, elements of its storage, ranks and this one's index."""

    held: int
    stored: int
    ranks: int
    index: int


class RankShares:
    """One rank's shares: `own` has one plan and one row, this rank's stage with its own shapes."""

    def __init__(self, inventory: Inventory, plans: Plans, rank: int) -> None:
        if len(plans) != 1:
            raise AssertionError("a rank belongs to one plan")
        setting = inventory.setting
        if setting.workload.lora_rank or setting.workload.mtp:
            raise BadInput("what a rank holds is worked out for full training, without adapters and without MTP depths")
        self.inventory = inventory
        self.plan = plans.row(0)
        self.place: Place = place_of(self.plan, rank)
        self.table: TensorTable = inventory.table
        whole = shares(inventory, plans)
        self.own: Shares = dataclasses.replace(
            whole,
            few=_shapes(self.table, self.plan, self.place),
            counts=self._counts()[np.newaxis, np.newaxis],
            pp_stage=ints([self.place.pp])[np.newaxis],
            known={},
            masks={},
            sizes={},
        )
        self.apart = bool(experts_apart(plans)[0])

    @cached_property
    def chunks(self) -> range:
        """The chunks (virtual stages) of this rank."""
        return chunks_of(self.place.pp, self.plan["pp"], self.plan["vpp"])

    def gathered_as(self, part: Part) -> str:
        """The dtype that a tensor is gathered in, and computed with."""
        for mask, dtype in self._gathered_parts:
            if mask[part.row]:
                return dtype
        raise AssertionError(f"{part.name} is gathered in no dtype")

    @cached_property
    def _gathered_parts(self) -> list[tuple[BoolArray, str]]:
        return gathered_parts(self.table, self.inventory.setting.dtype("gathered"))

    @cached_property
    def layers(self) -> list[int]:
        """The layers of this rank, in the order of its chunks."""
        setting = self.inventory.setting
        chunks = self.plan["pp"] * self.plan["vpp"]
        per_chunk = layers_per_chunk(
            setting.model.num_layers,
            chunks,
            setting.profile.split,
            setting.scenario.pp_layout,
            compute_costs(setting.model),
        )
        return [layer for chunk in self.chunks for layer in layers_of(chunk, per_chunk)]

    @property
    def first(self) -> bool:
        """Whether the embedding is here."""
        return self.place.pp == 0

    @property
    def last(self) -> bool:
        """Whether what follows the last block is here."""
        return self.place.pp == self.plan["pp"] - 1

    def _counts(self) -> IntArray:
        """[slots]: how often this rank holds each slot."""
        model, at = self.inventory.setting.model, self.table.at
        counts = np.zeros(at.count, dtype=np.int64)
        counts[at.embedding], counts[at.final] = self.first, self.last
        counts[at.copy] = self.last and model.tied and not self.first
        for slot, block in enumerate(model.blocks, start=1):
            counts[slot] = len(set(block.layers) & set(self.layers))
        return counts

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Every tensor of this rank, layers spelled out."""
        return tuple(self._parts())

    def _parts(self) -> Iterator[Part]:
        model, at = self.inventory.setting.model, self.table.at
        together = "embedding+final" if model.tied and self.first and self.last else ""
        if self.first:
            yield from self._slot(at.embedding, "", together or "embedding")
        kinds = {layer: slot for slot, block in enumerate(model.blocks, start=1) for layer in block.layers}
        for layer in self.layers:
            prefix = model.layer_prefix.replace("{i}", str(layer))
            yield from self._slot(kinds[layer], prefix, prefix.rstrip("."))
        if self.last:
            yield from self._slot(at.final, "", together or "final")
            if model.tied and not self.first:
                yield from self._slot(at.copy, "", "final")

    def _slot(self, slot: int, prefix: str, unit: str) -> Iterator[Part]:
        model, table, few = self.inventory.setting.model, self.table, self.own.few
        block = model.blocks[slot - 1] if prefix else None
        for index, row in enumerate(np.flatnonzero(table.slots == slot).tolist()):
            name = table.names[row]
            if block is not None:
                name = prefix + block.tensors[index].name.replace("{e}", "*")
            expert = bool(table.expert[row])
            stack = expert or int(table.copies[row]) > 1
            yield Part(
                row=row,
                name=name,
                unit=f"{unit} experts" if expert and self.apart else unit,
                rows=int(few.rows[0, row]),
                rest=int(few.rest[0, row]),
                copies=int(few.copies[0, row]) if stack else 0,
            )

    def cut(self, part: Part, *, sharded: bool) -> Cut:
        """How the ranks that share a tensor divide it: along dimension 0, a stack along its members first. [fsdp2]

        What `shares.tensor_elements` says of the fullest rank, of this one.
        """
        if not sharded:
            return Cut(held=part.numel, stored=part.numel, ranks=1, index=0)
        expert = bool(self.table.expert[part.row])
        ranks = int((self.own.expert if expert else self.own.dense)[0])
        index = self.place.expert if expert else self.place.dense
        rows, rest, times = part.rows, part.rest, 1
        if part.copies:
            vector = self.own.vectors_by_expert and int(self.table.rest[part.row]) == 1
            if expert and ranks > part.copies and not vector:
                times = part.copies
            else:
                rows, rest = part.copies, part.rows * part.rest
        chunk = ceil_div(rows, ranks)
        held = int(partition.of_rank(ints(rows), ints(chunk), ints(index))[0])
        return Cut(held=held * rest * times, stored=int(chunk) * rest * times, ranks=ranks, index=index)


def _shapes(table: TensorTable, plan: dict[str, int], place: Place) -> LocalShapes:
    """[1, T]: what this rank owns of each tensor before sharding, where TensorTable.local has the fullest rank."""
    over = np.where(table.expert, plan["etp"], plan["tp"])
    index = np.where(over == 1, 0, place.tp)
    length = np.where(table.tp_dim == 1, table.rest, table.rows)
    units = np.where(table.tp_units == 0, length, table.tp_units)
    cut = partition.of_rank(units, ceil_div(units, over), index) * (length // np.maximum(units, 1))
    copies = partition.of_rank(table.copies, ceil_div(table.copies, plan["ep"]), np.full_like(table.copies, place.ep))
    return LocalShapes(
        rows=np.where(table.tp_dim == 0, cut, table.rows)[np.newaxis],
        rest=np.where(table.tp_dim == 1, cut, table.rest)[np.newaxis],
        copies=np.where(table.expert, copies, table.copies)[np.newaxis],
    )
