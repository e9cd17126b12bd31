"""Bytes of the training states that each pipeline stage holds, at each instant of a step.

States depend on few columns, so they are computed on the distinct combinations of those and gathered: the same code
serves one plan and a million.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from trainledger.account.shares import Shares, pooled_elements, shares, tensor_elements
from trainledger.arrays import IntArray, ceil_div, ints, one_of, stacked
from trainledger.dtypes import bytes_of, kept_bytes
from trainledger.inventory.buffers import Buffer, gathered_bytes
from trainledger.inventory.inventory import Inventory
from trainledger.inventory.tensors import BoolArray, LocalShapes
from trainledger.plans import sharding
from trainledger.plans.plan import Plans
from trainledger.profiles.profile import CATEGORIES, INSTANTS, Category, Instant

COLUMNS = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp_replicate", "dp_shard", "zero_stage", "num_microbatches")


def buffer_bytes(own: Shares, buffer: Buffer) -> IntArray:
    """[plans, rows]: bytes of one buffer on each stage, conditions on plan columns not yet applied."""
    row = buffer.row
    if row.select in ("bucket", "largest_module"):
        fixed = bytes_of(ints(buffer.elements * row.copies), buffer.dtype)
        return np.broadcast_to(fixed[:, None], own.pp_stage.shape) * (own.counts.sum(axis=2) > 0)
    if row.select == "largest_unit":
        return _unit_bytes(own, buffer)
    if row.select == "largest_tensor":
        members = own.shapes.copies if own.stacked else 1
        numel = own.shapes.numel * members
        return bytes_of(np.max(numel[:, None, :] * (own.held > 0) * buffer.mask, axis=2), buffer.dtype)
    if row.cut == "none" and len(own.plans) > 1:
        amount = own.total_few(_sized(own.few, buffer, own.few.numel, own.few.copies, 1))
    elif row.cut in ("none", "dim0", "tensor"):
        amount = own.total(tensor_bytes(own, buffer))
    else:
        dense, expert = pooled_elements(
            own, row.cut, row.sharded_from, buffer.mask, factored=buffer.layout == "factored"
        )
        amount = _dtype_bytes(buffer, dense) + _dtype_bytes(buffer, expert)
    amount = amount * (row.copies * buffer.copies)
    if row.cap:
        amount = np.minimum(amount, bytes_of(ints(row.cap), buffer.dtype))
    return amount


def tensor_bytes(own: Shares, buffer: Buffer) -> IntArray:
    """[plans, T]: bytes of a buffer per tensor held once, for cuts that keep tensors apart."""
    if len(own.plans) > 1:
        return _tensor_bytes(own, buffer)
    if id(buffer) not in own.sizes:
        own.sizes[id(buffer)] = _tensor_bytes(own, buffer)
    return own.sizes[id(buffer)]


def _tensor_bytes(own: Shares, buffer: Buffer) -> IntArray:
    elements, storages = tensor_elements(own, buffer.row.cut, buffer.row.sharded_from)
    return _sized(own.shapes, buffer, elements, storages, _matrices(own, buffer))


def _sized(
    shapes: LocalShapes, buffer: Buffer, elements: IntArray, storages: IntArray, matrices: IntArray | int
) -> IntArray:
    """Bytes of `storages` that hold `elements` each; a factored moment has rows and columns of stacked `matrices`."""
    if buffer.layout == "factored":
        # Adafactor averages rows and columns of matrices; vectors keep one value per element
        elements = np.where(shapes.rest > 1, ceil_div(elements, shapes.rest) + matrices * shapes.rest, elements)
    if buffer.row.per > 1:
        elements = ceil_div(elements, buffer.row.per)
    return _dtype_bytes(buffer, elements) * storages * buffer.mask


def _matrices(own: Shares, buffer: Buffer) -> IntArray | int:
    """[plans, T]: matrices that one storage stacks: the experts it holds a whole or a part of."""
    if not own.stacked or buffer.row.cut != "dim0":
        return 1
    copies = own.shapes.copies
    over = own.over(buffer.row.sharded_from)[1][:, None]
    return np.where(own.table.expert, np.where(over <= copies, ceil_div(copies, over), copies), 1)


def _dtype_bytes(buffer: Buffer, elements: IntArray) -> IntArray:
    if buffer.layout == "block":
        return buffer.quantised_bytes(elements)
    return kept_bytes(elements, buffer.dtype)


def _unit_bytes(own: Shares, buffer: Buffer) -> IntArray:
    """[plans, rows]: the largest thing gathered at once, a block, the embedding or the output layer, `copies` times.

    Gradients of a unit are as large as its trained weights.
    """
    row, elements = buffer.row, own.few.numel * own.few.copies
    if row.dtype == "gathered":
        held = gathered_bytes(own.table, elements, buffer.dtype) * buffer.mask
    else:
        held = bytes_of(elements, buffer.dtype) * own.table.trainable
    units = own.table.by_slot(held)[own.kind]
    largest = np.max((own.filled > 0) * units[:, None, :], axis=2) * row.copies
    if not row.floor:
        return largest
    return np.minimum(np.maximum(largest, bytes_of(ints(row.floor), buffer.dtype)), own.total_few(held))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateAccount:
    """Bytes [plans, rows] by category and instant on the device, and by category in host memory.

    index     [n]: which row of the arrays answers for plan i of the request
    pp_stage  [plans, rows]
    """

    index: IntArray
    pp_stage: IntArray
    held: dict[tuple[Category, Instant], IntArray]
    host: IntArray

    def at(self, instant: Instant) -> IntArray:
        """[plans, rows]: all states alive at one instant."""
        weights, gradients, optimizer, buffers = (self.held[category, instant] for category in CATEGORIES)
        return weights + gradients + optimizer + buffers

    def largest(self, category: Category) -> IntArray:
        """[plans, rows]: a category at its own largest instant."""
        return np.maximum.reduce([self.held[category, instant] for instant in INSTANTS])


def state_account(inventory: Inventory, plans: Plans) -> StateAccount:
    """The states of every plan, computed once per distinct combination of the columns they depend on."""
    parts, index = distinct_shares(inventory, plans)
    return joined([account_of(inventory, own, index) for own in parts])


def distinct_shares(inventory: Inventory, plans: Plans) -> tuple[list[Shares], IntArray]:
    """(the shares of distinct plans, those of each zero_stage apart; which of them all, in order, is a plan's).

    Buffers exist under some stages only: each stage apart computes none that it lacks.
    """
    accumulating = dataclasses.replace(plans, num_microbatches=np.minimum(plans.num_microbatches, 2))
    distinct, index = accumulating.distinct(COLUMNS)
    staged, place = distinct.by_zero_stage()
    return [shares(inventory, part) for part in staged], place[index]


def joined(parts: list[StateAccount]) -> StateAccount:
    """One account of the parts put one after another."""
    if len(parts) == 1:
        return parts[0]
    return StateAccount(
        index=parts[0].index,
        pp_stage=stacked([part.pp_stage for part in parts]),
        held={key: stacked([part.held[key] for part in parts]) for key in parts[0].held},
        host=stacked([part.host for part in parts]),
    )


def account_of(inventory: Inventory, own: Shares, index: IntArray, *, with_passing: bool = True) -> StateAccount:
    """The states of shares already worked out; `index` says which of them answers for each plan asked about.

    with_passing   with the buffers that come and go within a step, which account/memory places itself
    """
    plans = own.plans
    zeros = np.zeros_like(own.pp_stage)
    host = zeros
    always: dict[Category, IntArray] = dict.fromkeys(CATEGORIES, zeros)
    passing: dict[tuple[Category, Instant], IntArray] = {}
    for buffer in inventory.buffers:
        exists, anywhere = standing(own, buffer)
        if not anywhere or (buffer.row.passing and not with_passing):
            continue
        amount = buffer_bytes(own, buffer) * exists[:, None]
        category = buffer.row.category
        if on_host(buffer, inventory.setting.offload_moves):
            host = host + amount
        elif buffer.row.alive == INSTANTS:
            always[category] = always[category] + amount
        else:
            for instant in INSTANTS:
                alive = alive_at(buffer, instant, plans)
                if alive is not None:
                    key = (category, instant)
                    passing[key] = passing.get(key, zeros) + amount * alive
    held: dict[tuple[Category, Instant], IntArray] = {}
    for category in CATEGORIES:
        for instant in INSTANTS:
            held[category, instant] = always[category] + passing.get((category, instant), 0)
    return StateAccount(index=index, pp_stage=own.pp_stage, held=held, host=host)


def on_host(buffer: Buffer, offload: tuple[tuple[Category, ...], ...]) -> bool:
    """Whether a buffer lives in host memory.

    Rows name their place; where a profile has no host rows, offloading moves the row itself.
    """
    if buffer.row.place == "host":
        return True
    if buffer.row.offload or buffer.row.not_offload:
        return False
    return buffer.row.sharded_from < 4 and any(buffer.row.category in moves for moves in offload)


def standing(own: Shares, buffer: Buffer) -> tuple[BoolArray, bool]:
    """([plans] where a buffer exists, whether anywhere)."""
    row = buffer.row
    key = (row.zero, row.pp, row.only_accumulating, row.wrapped)
    if key not in own.masks:
        mask = plan_mask(own.plans, buffer)
        own.masks[key] = mask, bool(mask.any())
    return own.masks[key]


def plan_mask(plans: Plans, buffer: Buffer) -> BoolArray:
    """[plans]: where the row's conditions on plan columns hold."""
    row = buffer.row
    exists = one_of(plans.zero_stage, row.zero, 4)
    if row.pp:
        exists = exists & ((plans.pp > 1) == (row.pp == ">1"))
    if row.only_accumulating:
        exists = exists & (plans.num_microbatches > 1)
    if row.wrapped:
        exists = exists & sharding.wrapped(plans, row.wrapped)
    return exists


def alive_at(buffer: Buffer, instant: Instant, plans: Plans) -> IntArray | int | None:
    """1 or a mask [plans, 1] where the buffer is alive at an instant, None where it never is."""
    if instant in buffer.row.alive:
        return 1
    if buffer.row.accumulates and instant == "loss":
        return (plans.num_microbatches > 1)[:, None].astype(np.int64)
    return None
