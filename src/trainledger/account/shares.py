"""What one rank owns of each tensor, and the elements it stores of them under each cut of an engine.

Before sharding few columns of a plan decide what a rank owns, and few others how often a stage holds each slot of the
TensorTable; the two meet in the sums over a stage.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property

import numpy as np

from trainledger.arrays import IntArray, ceil_div, ints, round_up
from trainledger.dtypes import bytes_of
from trainledger.inventory.inventory import Inventory
from trainledger.inventory.tensors import BoolArray, LocalShapes, TensorTable
from trainledger.plans import partition, sharding
from trainledger.plans.plan import Plans
from trainledger.profiles.profile import Cut


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shares:
    """What one rank owns of each tensor before sharding, and how often its stage holds it: arrays of one chunk.

    Before sharding few columns decide, so tensors are worked out per distinct combination of them, a kind.

    few           [kinds, T]: the shapes of each kind
    kind          [plans]: which of them is a plan's
    counts        [plans, rows, slots]: how often a stage holds each slot
    pp_stage      [plans, rows]
    dense, expert [plans]: ranks that share a sharded dense tensor, a sharded routed expert
    """

    plans: Plans
    few: LocalShapes
    kind: IntArray
    counts: IntArray
    pp_stage: IntArray
    dense: IntArray
    expert: IntArray
    table: TensorTable
    stacked: bool
    vectors_by_expert: bool
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

    @cached_property
    def shapes(self) -> LocalShapes:
        """[plans, T]: the shapes of each plan."""
        few, kind = self.few, self.kind
        if len(few.rows) == len(kind) == 1:
            return few
        return LocalShapes(rows=few.rows[kind], rest=few.rest[kind], copies=few.copies[kind])

    @cached_property
    def held(self) -> IntArray:
        """[plans, rows, T]: how often a stage holds each tensor, copies not counted."""
        return self.counts[:, :, self.table.slots]

    @cached_property
    def filled(self) -> IntArray:
        """[plans, rows, S]: how often a stage holds each slot that has tensors."""
        return self.counts[:, :, self.table.filled]

    def total(self, per_tensor: IntArray) -> IntArray:
        """[plans, rows]: a per-tensor amount [plans, T] summed over what each stage holds."""
        return np.einsum("us,urs->ur", self.table.by_slot(per_tensor), self.filled)

    def total_few(self, per_tensor: IntArray) -> IntArray:
        """[plans, rows]: the same of an amount [kinds, T]."""
        return np.einsum("us,urs->ur", self.table.by_slot(per_tensor)[self.kind], self.filled)

    def times(self, mask: BoolArray) -> IntArray:
        """[plans, rows]: how often a stage holds a slot with a masked tensor, all slots together."""
        return self.counts[:, :, np.unique(self.table.slots[mask])].sum(axis=2)


def shares(inventory: Inventory, plans: Plans) -> Shares:
    """The shares of each plan."""
    counts, stage = inventory.stage_counts(plans)
    table = inventory.table
    kinds, kind = plans.distinct(("tp", "etp", "ep"))
    return Shares(
        plans=plans,
        few=table.local(kinds, inventory.setting.profile),
        kind=kind,
        counts=counts,
        pp_stage=stage,
        dense=sharding.shard_group(plans, expert=False),
        expert=sharding.shard_group(plans, expert=True),
        table=table,
        stacked=inventory.setting.profile.experts_stacked,
        vectors_by_expert=inventory.setting.profile.vectors_by_expert,
    )


def tensor_elements(own: Shares, cut: Cut, sharded_from: int) -> tuple[IntArray, IntArray]:
    """([plans, T] elements of one storage, [plans, T] storages of it) for the cuts that keep tensors apart."""
    key: tuple[object, ...] = (cut, sharded_from)
    if key not in own.known:
        own.known[key] = _tensor_elements(own, cut, sharded_from)
    return own.known[key]


def _tensor_elements(own: Shares, cut: Cut, sharded_from: int) -> tuple[IntArray, IntArray]:
    shapes = own.shapes
    dense, expert = own.over(sharded_from)
    over = np.where(own.table.expert, expert[:, None], dense[:, None])
    if cut == "none":
        return shapes.numel, shapes.copies
    if cut == "tensor":
        return partition.per_tensor(shapes.numel, over), shapes.copies
    table, whole = own.table, partition.dim0(shapes.rows, shapes.rest, over)
    if not own.stacked or not (table.copies > 1).any():
        return whole, shapes.copies
    # a stack is cut along its members; experts along their rows where more ranks than experts share them
    along_rows = table.expert & (over > shapes.copies)
    if own.vectors_by_expert:
        along_rows &= table.rest > 1
    elements = np.where(along_rows, shapes.copies * whole, partition.dim0(shapes.copies, shapes.numel, over))
    stack = table.expert | (table.copies > 1)
    return np.where(stack, elements, whole), np.where(stack, 1, shapes.copies)


def pooled_elements(
    own: Shares, cut: Cut, sharded_from: int, mask: BoolArray, *, factored: bool = False
) -> tuple[IntArray, IntArray]:
    """([plans, rows] dense, expert) elements one rank stores of the masked tensors where they share a buffer.

    factored   of a matrix only a row and a column
    """
    key = (cut, sharded_from, factored, mask.tobytes())
    if key not in own.known:
        own.known[key] = _pool(own, cut, sharded_from, mask, factored=factored)
    return own.known[key]


def _pool(own: Shares, cut: Cut, sharded_from: int, mask: BoolArray, *, factored: bool) -> tuple[IntArray, IntArray]:
    few = own.few
    over_dense, over_expert = own.over(sharded_from)
    numel = np.where(few.rest > 1, few.rows + few.rest, few.numel) if factored else few.numel
    if cut == "bucket":
        dense, expert = megatron_buffers(own, mask, padded=True)
        return dense // over_dense[:, None], expert // over_expert[:, None]
    if cut == "flat_unit":
        whole = np.einsum("us,urs->ur", flat_unit_elements(own, mask), own.counts)
        return whole // over_dense[:, None], np.zeros_like(whole)
    amounts: list[IntArray] = []
    for chosen, over, group in (
        (mask & ~own.table.expert, over_dense[:, None], own.dense[:, None]),
        (mask & own.table.expert, over_expert[:, None], own.expert[:, None]),
    ):
        if not chosen.any():
            amounts.append(np.zeros_like(own.pp_stage))
            continue
        total = own.total_few(numel * few.copies * chosen)
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
    plans, table, few = own.plans, own.table, own.few
    each = round_up(few.numel, partition.MEGATRON_PARAM_ALIGN) if padded else few.numel
    numel = each * few.copies * mask
    apart = ((plans.ep > 1) | (plans.etp != plans.tp))[:, None]
    expert = own.total_few(numel * table.expert)
    dense = own.total_few(numel * ~table.expert) + expert * ~apart
    if not padded:
        return dense, expert * apart
    alone = own.total_few(numel * table.shared) * (plans.pp > 1)[:, None]
    group = own.dense[:, None]
    whole = partition.bucket_padded(dense - alone, group) + partition.bucket_padded(alone, group)
    return whole, partition.bucket_padded(expert * apart, own.expert[:, None])


def flat_unit_elements(own: Shares, mask: BoolArray | None = None) -> IntArray:
    """[plans, slots]: elements of FSDP's flat parameters: of each block, and of the root at the embedding's slot.

    The root has both ends of the model. Adapters are flat parameters each by itself. [fsdp1, peft-fsdp]

    mask   of tensors that train, or that do not; None: all of them
    """
    few, table, at = own.few, own.table, own.table.at
    chosen = np.ones_like(table.trainable) if mask is None else mask
    adapters = table.trainable & (not table.trainable.all())
    ends = np.isin(table.slots, [at.embedding, at.final])
    root = at.embedding if at.embedding in table.slots else at.final
    found = np.zeros((len(own.kind), at.count), dtype=np.int64)
    for slot in np.unique(np.where(ends, root, table.slots)):
        here = (ends if slot == root else table.slots == slot) & chosen
        for members in (here & ~adapters, here & adapters):
            numel, copies = few.numel[own.kind][:, members], few.copies[own.kind][:, members]
            if not numel.size:
                continue
            if adapters[members].all():
                found[:, slot] += (round_up(numel, own.dense[:, None]) * copies).sum(axis=1)
            else:
                found[:, slot] += partition.flat_unit(numel, copies, own.dense)
    return found


def flat_unit_bytes(own: Shares, dtype: str) -> IntArray:
    """[plans, slots]: bytes of flat parameters as they are gathered; 4-bit weights travel as they are packed."""
    table = own.table
    masks = (table.trainable, ~table.trainable & ~table.quantised, table.quantised)
    parts = zip(masks, (dtype, dtype, "fp4"), strict=True)
    return sum((bytes_of(flat_unit_elements(own, mask), kind) for mask, kind in parts if mask.any()), ints(0))


def _unit_elements(own: Shares, chosen: BoolArray, over: IntArray, group: IntArray) -> IntArray:
    """Megatron-FSDP: the buckets of all units, each padded to the ranks times its chunk factor. [megatron-fsdp]

    Packing remainders into shared chunks is not followed: a unit counts the elements it holds, so this is the least.
    """
    few, slots, kind = own.few, own.table.slots, own.kind
    padded = np.zeros_like(own.pp_stage)
    for slot in np.unique(slots[chosen]):
        members = chosen & (slots == slot)
        numel = few.numel[:, members]
        held = (numel * few.copies[:, members]).sum(axis=1)[kind]
        factor = partition.chunk_factor(few.rest[:, members], numel)[kind]
        padded = padded + own.counts[:, :, slot] * round_up(held[:, None], group * factor[:, None])
    return padded // over


def shares_elements(own: Shares, mask: BoolArray, cut: Cut) -> IntArray:
    """[plans, rows]: elements of the masked tensors on one rank: of one shard, or whole where `cut` is none."""
    sharded_from = 4 if cut == "none" else 0
    if cut in ("none", "dim0", "tensor"):
        elements, storages = tensor_elements(own, cut, sharded_from)
        return own.total(elements * storages * mask)
    dense, expert = pooled_elements(own, cut, sharded_from, mask)
    return dense + expert
