"""Data-parallel traffic of PyTorch: what FSDP2, replicas and DistributedDataParallel send in one optimizer step.

A unit is gathered and reduced at once: the embedding, each block, what follows the last block. A tied output layer on
the stage of the embedding makes one unit of both ends; on a stage of its own, its copy of the embedding belongs to what
follows the last block. Routed experts are units of their own where their ranks are others than those of dense tensors,
else part of their block. Bytes include the padding of every tensor to a multiple of the ranks. [fsdp2-units]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from trainledger.account.shares import Shares, shares_elements
from trainledger.account.traffic.collectives import Collective, collective, summed
from trainledger.account.traffic.side import Side
from trainledger.arrays import IntArray
from trainledger.dtypes import bytes_of, kept_bytes
from trainledger.inventory.buffers import gathered_parts
from trainledger.inventory.inventory import Inventory
from trainledger.inventory.tensors import BoolArray
from trainledger.plans import sharding
from trainledger.plans.partition import ddp_bucket_count
from trainledger.plans.plan import Plans

Measure = Callable[[Side, BoolArray], IntArray]
"""[plans, rows]: bytes of the masked tensors of a side."""


def unit_traffic(inventory: Inventory, own: Shares) -> Iterator[Collective]:
    """DDP, or replicas unit by unit, at stage 0; FSDP2 units otherwise; the norm that clips. [fsdp2-knobs]"""
    dense = Side(inventory, own, expert=False)
    experts = Side(inventory, own, expert=True) if own.table.expert.any() else None
    yield from _stepped(_Units(dense, experts))
    if experts is not None:
        yield from _stepped(_Units(experts, None))
    if count := inventory.setting.profile.traffic.norm_all_reduces:
        times, size = count * (own.counts.sum(axis=2) > 0), bytes_of(np.ones_like(own.pp_stage), "fp32")
        yield collective("all_reduce", "world", "gradient norm", "fp32", own.plans.gpus, times, size, "torch-clip")
    yield from _recipe_traffic(dense)


def _recipe_traffic(side: Side) -> Iterator[Collective]:
    """One number that says whether a scaled gradient is not finite; a largest element for each weight that is FP8."""
    own, recipe = side.own, side.setting.recipe
    here = (own.counts.sum(axis=2) > 0).astype(np.int64)
    if recipe.scaled_loss:
        size = bytes_of(here, "fp32")
        yield collective("all_reduce", "world", "infinities", "fp32", own.plans.gpus, here, size, "torch-scaler")
    if recipe.weight_scales:
        covered = own.table.linear & ~own.table.expert & ~own.table.quantised
        total = bytes_of(own.held[:, :, covered].sum(axis=2), "fp32")
        calls = side.plans.vpp[:, None] * np.sign(total)
        sharded = np.where(side.plans.zero_stage > 0, own.dense, 1)
        for group, ranks in (("dp_shard", sharded), ("tp", side.plans.tp)):
            yield summed("all_reduce", group, "scales of weights", "fp32", ranks, calls, total, "torchao-fp8-gather")


def experts_apart(plans: Plans) -> BoolArray:
    """[plans]: where routed experts have other ranks than dense tensors, and so are units of their own."""
    return (plans.ep > 1) | (plans.etp != plans.tp)


class _Units:
    """The units that are sent over one side's ranks: its own tensors, and experts that have no ranks of their own."""

    def __init__(self, side: Side, joining: Side | None) -> None:
        self.side = side
        self.joining = joining
        apart = experts_apart(side.plans)[:, None]
        self.here = apart.astype(np.int64) if side.expert else np.ones_like(apart, dtype=np.int64)
        self.joined = (~apart).astype(np.int64)

    def calls(self, mask: BoolArray) -> IntArray:
        """[plans, rows]: units with a masked tensor."""
        own, table = self.side.own, self.side.own.table
        units = self.here * own.times(mask & self.side.all)
        if self.joining is not None:
            units = units + self.joined * (own.times(mask) - own.times(mask & self.side.all))
        if not self.side.setting.model.tied or self.side.expert:
            return units
        ends = [own.times(mask & (table.slots == at)) for at in (table.at.embedding, table.at.final, table.at.copy)]
        return units - np.minimum(ends[0], ends[1]) - np.minimum(ends[2], ends[1])

    def bytes(self, mask: BoolArray, measure: Measure) -> IntArray:
        """[plans, rows]: bytes of the masked tensors of these units."""
        total = self.here * measure(self.side, mask & self.side.all)
        if self.joining is not None:
            total = total + self.joined * measure(self.joining, mask & self.joining.all)
        return total


def _stepped(units: _Units) -> Iterator[Collective]:
    side, setting = units.side, units.side.setting
    reduce, trained = setting.dtype("reduce"), side.own.table.trainable
    deferred = (side.plans.pp > 1)[:, None] * int(setting.profile.traffic.pipeline_keeps_gathered)
    if (replicated := side.once(0)).any():
        yield from _replicated(units, replicated, deferred)
    if not side.once(1, 2, 3).any():
        return
    for mask, dtype in _by_width(side):
        yield _gathered(units, mask, dtype, side.once(3) * deferred)
    scatters = side.once(1) + side.once(2, 3) * np.where(deferred, 1, side.batches)
    total = scatters * units.bytes(trained, lambda of, mask: bytes_of(of.whole(mask, "dim0"), reduce))
    calls = scatters * units.calls(trained)
    yield side.fixed("reduce_scatter", "gradients", reduce, calls, total, "fsdp2-units")
    yield side.across(reduce, calls, total, "fsdp2-hsdp")


def _replicated(units: _Units, replicated: IntArray, deferred: IntArray) -> Iterator[Collective]:
    """DDP's buckets, or units, once per step; torchtitan's replicas reduce each unit after every micro-batch.

    DDP wraps what it need not cast, where nothing but data is parallel. [torch-ddp, torch-replicate]
    """
    side, setting = units.side, units.side.setting
    trained, every = side.own.table.trainable, setting.profile.traffic.replicas_by_unit
    ddp = np.zeros_like(replicated)
    if not every and not setting.casts:
        ddp = replicated * sharding.wrapped(side.plans, "ddp")[:, None]
    if ddp.any():
        dtype = setting.dtype("grad")
        total = ddp * units.bytes(trained, _plain(dtype))
        yield side.averaged("gradients", dtype, ddp * _ddp_buckets(units, dtype, ddp), total, "torch-ddp")
    if (times := replicated * (1 - ddp)).any():
        dtype = setting.dtype("reduce")
        times = times * (np.where(deferred, 1, side.batches) if every else 1)
        calls, total = times * units.calls(trained), times * units.bytes(trained, _plain(dtype))
        yield side.averaged("gradients of units", dtype, calls, total, "torch-replicate")


def _plain(dtype: str) -> Measure:
    return lambda of, mask: bytes_of(shares_elements(of.own, mask, "none"), dtype)


def _by_width(side: Side) -> Iterator[tuple[BoolArray, str]]:
    """(tensors, dtype) of gathers: units with a matrix in FP8 travel as bytes whatever else is in them.

    [torch: _fsdp_collectives.py, _get_all_gather_input_metadatas]
    """
    table, gathered = side.own.table, side.setting.dtype("gathered")
    if gathered != "fp8":
        yield np.ones(len(table.names), dtype=bool), gathered
        return
    (matrices, _), *_ = gathered_parts(table, gathered)
    mixed = np.isin(table.slots, table.slots[matrices & side.all])
    yield mixed, gathered
    yield ~mixed, "bf16"


def _gathered(units: _Units, mask: BoolArray, dtype: str, held: IntArray) -> Collective:
    """All-gathers of weights: once per step at stages 1, 2 and where held, else twice per micro-batch."""
    side = units.side
    measure = _as_gathered(side.setting.dtype("gathered"))
    per_batch = (side.once(3) - held) * side.batches
    times = side.once(1, 2) + held + 2 * per_batch
    calls, total = times * units.calls(mask), times * units.bytes(mask, measure)
    if side.setting.profile.traffic.final_unit_kept and not side.expert:
        final = _final_unit(side) & mask
        calls, total = calls - per_batch * units.calls(final), total - per_batch * units.bytes(final, measure)
    return side.fixed("all_gather", "weights", dtype, calls, total, "fsdp2-units")


def _final_unit(side: Side) -> BoolArray:
    """What follows the last block, and a tied embedding with it: kept gathered. [torchtitan: fsdp.py 238-266]"""
    slots = side.own.table.slots
    at = side.own.table.at
    kept = slots == at.final
    return kept | (slots == at.embedding) if side.setting.model.tied else kept


def _as_gathered(gathered: str) -> Measure:
    """Each tensor in the dtype it travels in, padded."""

    def measure(of: Side, mask: BoolArray) -> IntArray:
        total = np.zeros_like(of.own.pp_stage)
        for part, kind in gathered_parts(of.own.table, gathered):
            total = total + kept_bytes(of.whole(mask & part, "dim0"), kind)
        return total

    return measure


def _ddp_buckets(units: _Units, dtype: str, wrapped: IntArray) -> IntArray:
    """[plans, rows]: all-reduces DDP issues, by its own bucketing, once per distinct list of sizes."""
    own, trained = units.side.own, units.side.own.table.trainable
    sizes = bytes_of(own.shapes.numel, dtype)
    known: dict[bytes, int] = {}
    buckets = np.zeros_like(own.pp_stage)
    for plan, row in zip(*np.nonzero((units.calls(trained) > 0) * wrapped), strict=True):
        times = own.held[plan, row] * trained
        key = sizes[plan].tobytes() + times.tobytes() + own.shapes.copies[plan].tobytes()
        if key not in known:
            known[key] = ddp_bucket_count(_in_order(own, sizes[plan], times, own.shapes.copies[plan]))
        buckets[plan, row] = known[key]
    return buckets


def _in_order(own: Shares, sizes: IntArray, times: IntArray, copies: IntArray) -> list[int]:
    """Sizes in registration order: the tensors of each block, block after block."""
    order: list[int] = []
    slots = own.table.slots
    for slot in np.unique(slots):
        members = np.nonzero((slots == slot) & (times > 0))[0]
        if len(members) == 0:
            continue
        one = [int(sizes[t]) for t in members for _ in range(int(copies[t]))]
        order.extend(one * int(times[members].max()))
    return order
