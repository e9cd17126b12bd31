"""The tensors of a model as arrays: one row per distinct tensor, never per layer.

A row belongs to a slot: the embedding, a distinct block, what follows the last one ... (slots.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from trainledger.arrays import IntArray, ceil_div, round_up
from trainledger.errors import BadInput
from trainledger.facts.model import Block, Model, Tensor
from trainledger.facts.workload import Workload
from trainledger.inventory.slots import Slots, slots_of
from trainledger.plans import partition
from trainledger.plans.plan import Plans
from trainledger.profiles.profile import Profile

BoolArray = NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorTable:
    """Columns of equal length T over distinct tensors, full shapes.

    rows, rest    shape[0] and the product of the other dimensions
    tp_dim        -1: whole on every TP rank; 0: `rows` is cut; 1: `rest` is cut
    tp_units      indivisible units along the cut dimension; 0: none
    copies        tensors of this shape in one block (routed experts)
    vocab         rows are the vocabulary, which engines pad
    multiplied    the weight of a matrix multiplication, routers and an output layer of its own included
    shared        an embedding that both ends of a pipeline hold: the first stage's and the last one's copy
    starts, filled  where the tensors of each slot begin, and the slots that have any, in order
    """

    names: tuple[str, ...]
    slots: IntArray
    rows: IntArray
    rest: IntArray
    tp_dim: IntArray
    tp_units: IntArray
    copies: IntArray
    expert: BoolArray
    linear: BoolArray
    trainable: BoolArray
    quantised: BoolArray
    vocab: BoolArray
    multiplied: BoolArray
    shared: BoolArray
    at: Slots
    starts: IntArray
    filled: IntArray

    def by_slot(self, per_tensor: IntArray) -> IntArray:
        """[..., S]: a per-tensor amount [..., T] summed over the tensors of each slot that has any."""
        return np.add.reduceat(per_tensor, self.starts, axis=-1)

    def local(self, plans: Plans, profile: Profile) -> LocalShapes:
        """What one tensor-, expert-parallel rank owns before any ZeRO sharding: arrays [plans, T]."""
        dense, experts = plans.tp[:, None], plans.etp[:, None]
        over = np.where(self.expert, experts, dense)
        rows = np.broadcast_to(self.rows, over.shape)
        if profile.vocab_multiple:
            padded = round_up(self.rows, profile.vocab_multiple * dense)
            rows = np.where(self.vocab, padded, rows)
        cut = partition.by_units(np.where(self.tp_dim == 1, self.rest, rows), self.tp_units, over)
        return LocalShapes(
            rows=np.where(self.tp_dim == 0, cut, rows),
            rest=np.where(self.tp_dim == 1, cut, self.rest),
            copies=np.where(self.expert, ceil_div(self.copies, plans.ep[:, None]), self.copies),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LocalShapes:
    """Arrays [plans, T]: dimension 0, the rest, and how many copies one rank owns."""

    rows: IntArray
    rest: IntArray
    copies: IntArray

    @property
    def numel(self) -> IntArray:
        """Elements of one copy."""
        return self.rows * self.rest


def tensor_table(model: Model, workload: Workload) -> TensorTable:
    """The table of a model, with LoRA adapters as rows of their own and frozen rows marked."""
    entries = list(_entries(model, workload))
    lora = workload.lora_rank > 0
    if lora and not any(adapter for _, _, adapter in entries):
        known = sorted({t.name.split(".")[-2] for b in model.blocks for t in b.tensors if t.linear and "." in t.name})
        raise BadInput(
            f"--lora-targets {','.join(workload.lora_targets)} match no linear layer of {model.name}; "
            f"use all-linear or some of {', '.join(known) or 'none: the model has no shapes'}"
        )
    tensors = [tensor for _, tensor, _ in entries]
    expert = np.array([t.role == "expert" for t in tensors])
    linear = np.array([t.projection for t in tensors])
    adapters = np.array([adapter for _, _, adapter in entries])
    slots = np.array([slot for slot, _, _ in entries], dtype=np.int64)
    starts = np.flatnonzero(np.diff(slots, prepend=-1))
    at = slots_of(model)
    copied = slots == at.copy
    embedding = (slots == at.embedding) & np.array([t.role == "embedding" for t in tensors])
    return TensorTable(
        names=tuple(t.name for t in tensors),
        slots=slots,
        rows=np.array([t.shape[0] for t in tensors], dtype=np.int64),
        rest=np.array([t.numel // t.shape[0] for t in tensors], dtype=np.int64),
        tp_dim=np.array([-1 if t.tp_dim is None else t.tp_dim for t in tensors], dtype=np.int64),
        tp_units=np.array([t.tp_units for t in tensors], dtype=np.int64),
        copies=np.array([t.copies for t in tensors], dtype=np.int64),
        expert=expert,
        linear=linear & ~adapters,
        trainable=adapters if lora else np.ones(len(tensors), dtype=bool),
        quantised=linear & ~adapters & workload.qlora,
        vocab=np.array([t.role in ("embedding", "head") and t.tp_dim == 0 for t in tensors]),
        multiplied=np.array([t.linear for t in tensors]),
        shared=copied | (embedding & copied.any()),
        at=at,
        starts=starts,
        filled=slots[starts],
    )


def _entries(model: Model, workload: Workload) -> Iterator[tuple[int, Tensor, bool]]:
    """(slot, tensor, is an adapter) with complete names, adapters after the layer they adapt."""
    at = slots_of(model)
    yield from ((at.embedding, tensor, False) for tensor in model.embedding)
    for slot, block in enumerate(model.blocks, start=1):
        yield from _block_entries(slot, model.layer_prefix.replace("{i}", _span(block.layers)), block, workload)
    yield from ((at.final, tensor, False) for tensor in model.final)
    if model.tied or (model.mtp is not None and workload.mtp):
        word = next(t for t in model.embedding if t.role == "embedding")
        yield at.copy, word, False
    if model.mtp is not None and workload.mtp:
        yield from _block_entries(at.mtp, "mtp.", model.mtp, workload)


def _block_entries(slot: int, prefix: str, block: Block, workload: Workload) -> Iterator[tuple[int, Tensor, bool]]:
    for tensor in block.tensors:
        named = msgspec.structs.replace(tensor, name=prefix + tensor.name.replace("{e}", "*"))
        yield slot, named, False
        if workload.lora_rank and _targeted(tensor, workload.lora_targets):
            yield from ((slot, adapter, True) for adapter in _adapters(named, workload.lora_rank))


def _span(layers: tuple[int, ...]) -> str:
    """How a line names the layers that share a shape: 0-79, or 1,3,5 where they alternate.

    >>> _span((0, 1, 2)), _span((0, 2, 4)), _span((7,))
    ('0-2', '0,2,4', '7')
    """
    if len(layers) > 1 and layers[-1] - layers[0] == len(layers) - 1:
        return f"{layers[0]}-{layers[-1]}"
    return ",".join(map(str, layers))


def _targeted(tensor: Tensor, targets: tuple[str, ...]) -> bool:
    if not tensor.linear or tensor.role == "head" or tensor.name.endswith(".bias"):
        return False
    parts = tensor.name.split(".")
    return targets == ("all-linear",) or any(part in targets for part in parts)


def _adapters(tensor: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """LoRA's A [rank, in] and B [out, rank] of a linear layer; the side that TP cuts follows the layer."""
    out_features, in_features = tensor.shape[0], tensor.numel // tensor.shape[0]
    stem = tensor.name.removesuffix(".weight")

    def side(name: str, shape: tuple[int, int], dim: int) -> Tensor:
        cut = tensor.tp_dim == dim
        return msgspec.structs.replace(
            tensor,
            name=f"{stem}.{name}.weight",
            shape=shape,
            tp_dim=dim if cut else None,
            tp_units=tensor.tp_units if cut else 0,
        )

    return side("lora_A", (rank, in_features), 1), side("lora_B", (out_features, rank), 0)
