"""Bytes of the training states that each pipeline stage holds, at each instant of a step.

States depend on few columns, so they are computed on the distinct combinations of those and gathered: the same code
serves one plan and a million.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from trainledger.arrays import IntArray, ceil_div, ints, one_of, round_up
from trainledger.dtypes import bytes_of
from trainledger.inventory.buffers import NF4_BLOCK, NF4_NESTED_BLOCK, Buffer
from trainledger.inventory.inventory import Inventory
from trainledger.inventory.tensors import BoolArray, LocalShapes, TensorTable
from trainledger.plans import partition, sharding
from trainledger.plans.plan import DEGREE_LIMIT, Plans
from trainledger.profiles.profile import CATEGORIES, INSTANTS, Category, Cut, Instant, StateRow

COLUMNS = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp_replicate", "dp_shard", "zero_stage", "num_microbatches")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What one rank owns of each tensor before sharding, and how often its stage holds it: arrays of one chunk.

    shapes        [plans, T]
    counts        [plans, rows, slots]: how often a stage holds each slot
    held          [plans, rows, T]: the same per tensor, copies not counted
    pp_stage      [plans, rows]
    dense, expert [plans]: ranks that share a sharded dense tensor, a sharded routed expert
    """

    plans: Plans
    shapes: LocalShapes
    counts: IntArray
    held: IntArray
    pp_stage: IntArray
    dense: IntArray
    expert: IntArray
    table: TensorTable
    stacked: bool
    known: dict[tuple[object, ...], tuple[IntArray, IntArray]] = dataclasses.field(default_factory=dict)
    """Elements already worked out, for most buffers of an engine are cut alike."""
    masks: dict[tuple[object, ...], tuple[BoolArray, bool]] = dataclasses.field(default_factory=dict)
    """Where rows with the same conditions hold, and whether anywhere."""
    sizes: dict[int, IntArray] = dataclasses.field(default_factory=dict)
    """Bytes per tensor of the buffers of a single plan, by id: its ledger asks twice."""

    def over(self, sharded_from: int) -> tuple[IntArray, IntArray]:
        """(dense, expert) divisors under each plan's zero_stage."""
        plans = self.plans
        return sharding.divisor(plans, self.dense, sharded_from), sharding.divisor(plans, self.expert, sharded_from)

    def total(self, per_tensor: IntArray) -> IntArray:
        """[plans, rows]: a per-tensor amount [plans, T] summed over what each stage holds."""
        return np.einsum("ut,urt->ur", per_tensor, self.held)


def shares(inventory: Inventory, plans: Plans) -> Shares:
    """The shares of each plan."""
    counts, stage = inventory.stage_counts(plans)
    table = inventory.table
    return Shares(
        plans=plans,
        shapes=table.local(plans, inventory.setting.profile),
        counts=counts,
        held=counts[:, :, table.slots],
        pp_stage=stage,
        dense=sharding.shard_group(plans, expert=False),
        expert=sharding.shard_group(plans, expert=True),
        table=table,
        stacked=inventory.setting.profile.experts_stacked,
    )


def tensor_elements(own: Shares, cut: str, sharded_from: int) -> tuple[IntArray, IntArray]:
    """([plans, T] elements of one storage, [plans, T] storages of it) for the cuts that keep tensors apart."""
    key: tuple[object, ...] = (cut, sharded_from)
    if key not in own.known:
        own.known[key] = _tensor_elements(own, cut, sharded_from)
    return own.known[key]


def _tensor_elements(own: Shares, cut: str, sharded_from: int) -> tuple[IntArray, IntArray]:
    shapes = own.shapes
    dense, expert = own.over(sharded_from)
    over = np.where(own.table.expert, expert[:, None], dense[:, None])
    if cut == "none":
        return shapes.numel, shapes.copies
    if cut == "tensor":
        return partition.per_tensor(shapes.numel, over), shapes.copies
    if not own.stacked or not own.table.expert.any():
        return partition.dim0(shapes.rows, shapes.rest, over), shapes.copies
    # stacked experts are cut along the experts, or along their rows where more ranks than experts share them
    along_experts = partition.dim0(shapes.copies, shapes.numel, over)
    along_rows = shapes.copies * partition.dim0(shapes.rows, shapes.rest, over)
    stacked = np.where(over <= shapes.copies, along_experts, along_rows)
    whole = partition.dim0(shapes.rows, shapes.rest, over)
    return np.where(own.table.expert, stacked, whole), np.where(own.table.expert, 1, shapes.copies)


def buffer_bytes(own: Shares, buffer: Buffer) -> IntArray:
    """[plans, rows]: bytes of one buffer on each stage, conditions on plan columns not yet applied."""
    row = buffer.row
    if row.elements:
        fixed = bytes_of(ints(row.elements * row.copies), buffer.dtype)
        return np.broadcast_to(fixed[:, None], own.pp_stage.shape) * (own.held.sum(axis=2) > 0)
    if row.select == "largest_unit":
        return _unit_bytes(own, buffer)
    if row.select == "largest_tensor":
        return bytes_of(np.max(own.shapes.numel[:, None, :] * (own.held > 0) * buffer.mask, axis=2), buffer.dtype)
    if row.select == "largest_module":
        return np.broadcast_to(bytes_of(ints(buffer.elements), buffer.dtype)[:, None], own.pp_stage.shape)
    if row.cut in ("none", "dim0", "tensor"):
        amount = own.total(tensor_bytes(own, buffer))
    else:
        dense, expert = _pooled_elements(own, buffer)
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
    if buffer.layout == "factored":
        elements = _factored(own, elements, _matrices(own, buffer))
    if buffer.row.per > 1:
        elements = ceil_div(elements, buffer.row.per)
    return _dtype_bytes(buffer, elements) * storages * buffer.mask


def _factored(own: Shares, elements: IntArray, matrices: IntArray | int) -> IntArray:
    """Adafactor's row and column averages of `matrices` together; vectors keep one value per element."""
    rest = own.shapes.rest
    rows = ceil_div(elements, rest)
    return np.where(rest > 1, rows + matrices * rest, elements)


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
    if buffer.layout == "nf4":
        scales = ceil_div(elements, NF4_BLOCK)
        nested = bytes_of(ceil_div(scales, NF4_NESTED_BLOCK), "fp32")
        return bytes_of(elements, "nf4") + bytes_of(scales, "uint8") + nested
    return bytes_of(elements, buffer.dtype)


def _pooled_elements(own: Shares, buffer: Buffer) -> tuple[IntArray, IntArray]:
    """([plans, rows] dense, expert) elements one rank stores where tensors share a buffer."""
    key = (buffer.row.cut, buffer.row.sharded_from, buffer.layout == "factored", buffer.mask.tobytes())
    if key not in own.known:
        own.known[key] = _pool(own, buffer)
    return own.known[key]


def _pool(own: Shares, buffer: Buffer) -> tuple[IntArray, IntArray]:
    cut, shapes = buffer.row.cut, own.shapes
    over_dense, over_expert = own.over(buffer.row.sharded_from)
    numel = _factored(own, shapes.numel, 1) if buffer.layout == "factored" else shapes.numel
    if cut == "bucket":
        dense, expert = megatron_buffers(own, buffer.mask, padded=True)
        return dense // over_dense[:, None], expert // over_expert[:, None]
    amounts: list[IntArray] = []
    for chosen, over, group in (
        (buffer.mask & ~own.table.expert, over_dense[:, None], own.dense[:, None]),
        (buffer.mask & own.table.expert, over_expert[:, None], own.expert[:, None]),
    ):
        if not chosen.any():
            amounts.append(np.zeros_like(own.pp_stage))
            continue
        total = own.total(numel * shapes.copies * chosen)
        match cut:
            case "flat":
                amounts.append(round_up(total, 2 * group) // over)
            case "unit":
                amounts.append(_unit_elements(own, chosen, over, group))
            case _:
                amounts.append(ceil_div(total, over))
    return amounts[0], amounts[1]


def megatron_buffers(own: Shares, mask: BoolArray, *, padded: bool) -> tuple[IntArray, IntArray]:
    """([plans, rows] dense, expert) elements of Megatron's whole buffers. [megatron: param_and_grad_buffer.py 888-932]

    Experts have a buffer of their own where their group differs: with ep 1 and etp equal to tp they share the dense
    one. With padding, as under the distributed optimizer, an embedding that both ends of a pipeline hold sits alone in
    a bucket.
    """
    key: tuple[object, ...] = ("megatron", padded, mask.tobytes())
    if key not in own.known:
        own.known[key] = _megatron_buffers(own, mask, padded=padded)
    return own.known[key]


def _megatron_buffers(own: Shares, mask: BoolArray, *, padded: bool) -> tuple[IntArray, IntArray]:
    plans, table = own.plans, own.table
    each = round_up(own.shapes.numel, partition.MEGATRON_PARAM_ALIGN) if padded else own.shapes.numel
    numel = each * own.shapes.copies * mask
    apart = ((plans.ep > 1) | (plans.etp != plans.tp))[:, None]
    expert = own.total(numel * table.expert)
    dense = own.total(numel * ~table.expert) + expert * ~apart
    if not padded:
        return dense, expert * apart
    alone = own.total(numel * table.shared) * (plans.pp > 1)[:, None]
    group = own.dense[:, None]
    whole = partition.bucket_padded(dense - alone, group) + partition.bucket_padded(alone, group)
    return whole, partition.bucket_padded(expert * apart, own.expert[:, None])


def _unit_elements(own: Shares, chosen: BoolArray, over: IntArray, group: IntArray) -> IntArray:
    """Megatron-FSDP: the buckets of all units, each padded to the ranks times its chunk factor. [megatron-fsdp]

    Packing remainders into shared chunks is not followed: a unit counts the elements it holds, so this is the least.
    """
    shapes, slots = own.shapes, own.table.slots
    # what one rank owns before sharding depends on few columns
    _, first, which = np.unique(own.plans.tp * DEGREE_LIMIT + own.plans.etp, return_index=True, return_inverse=True)
    rest, numel = shapes.rest[first], shapes.numel[first]
    padded = np.zeros_like(own.pp_stage)
    for slot in np.unique(slots[chosen]):
        members = chosen & (slots == slot)
        held = (shapes.numel[:, members] * shapes.copies[:, members]).sum(axis=1)
        factor = partition.chunk_factor(rest[:, members], numel[:, members])[which]
        padded = padded + own.counts[:, :, slot] * round_up(held[:, None], group * factor[:, None])
    return padded // over


def _unit_bytes(own: Shares, buffer: Buffer) -> IntArray:
    """[plans, rows]: the largest thing gathered at once, a block, the embedding or the output layer, `copies` times.

    An FP8 gather carries weight matrices in FP8 and the rest in bf16.
    """
    row, elements = buffer.row, own.shapes.numel * own.shapes.copies
    held = bytes_of(elements, buffer.dtype)
    if buffer.dtype == "fp8":
        held = np.where(own.table.linear, held, bytes_of(elements, "bf16"))
    slot_of = np.eye(own.table.num_slots, dtype=np.int64)[own.table.slots]
    largest = np.max(np.where(own.counts > 0, (held @ slot_of)[:, None, :], 0), axis=2) * row.copies
    if not row.floor:
        return largest
    return np.minimum(np.maximum(largest, bytes_of(ints(row.floor), buffer.dtype)), own.total(held))


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
    accumulating = dataclasses.replace(plans, num_microbatches=np.minimum(plans.num_microbatches, 2))
    distinct, index = accumulating.distinct(COLUMNS)
    return account_of(inventory, shares(inventory, distinct), index)


def account_of(inventory: Inventory, own: Shares, index: IntArray) -> StateAccount:
    """The states of shares already worked out; `index` says which of them answers for each plan asked about."""
    plans = own.plans
    zeros = np.zeros_like(own.pp_stage)
    host = zeros
    always: dict[Category, IntArray] = dict.fromkeys(CATEGORIES, zeros)
    passing: dict[tuple[Category, Instant], IntArray] = {}
    for buffer in inventory.buffers:
        exists, anywhere = standing(own, buffer)
        if not anywhere:
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
    key = (row.zero, row.pp, row.only_accumulating)
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
    return exists


def alive_at(buffer: Buffer, instant: Instant, plans: Plans) -> IntArray | int | None:
    """1 or a mask [plans, 1] where the buffer is alive at an instant, None where it never is."""
    if instant in buffer.row.alive:
        return 1
    if buffer.row.accumulates and instant == "loss":
        return (plans.num_microbatches > 1)[:, None].astype(np.int64)
    return None


def shares_elements(own: Shares, mask: BoolArray, cut: Cut) -> IntArray:
    """[plans, rows]: elements of the masked tensors on one rank: of one shard, or whole where `cut` is none."""
    row = StateRow(category="weights", what="", dtype="", cut=cut, sharded_from=4 if cut == "none" else 0)
    if cut in ("none", "dim0", "tensor"):
        elements, storages = tensor_elements(own, cut, row.sharded_from)
        return own.total(elements * storages * mask)
    dense, expert = _pooled_elements(own, Buffer(row=row, what="", dtype="", mask=mask))
    return dense + expert
