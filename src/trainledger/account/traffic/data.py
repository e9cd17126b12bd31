"""Data-parallel traffic: what gradients and sharded weights cost in one optimizer step, by engine.

Each style is a function Shares -> collectives. Bytes include the padding that the engine's cut adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from trainledger.account.shares import Shares, megatron_buffers, shares_elements
from trainledger.account.traffic.collectives import Collective, Op, collective, summed
from trainledger.arrays import IntArray, ceil_div, one_of
from trainledger.dtypes import bytes_of, kept_bytes
from trainledger.inventory.buffers import gathered_parts
from trainledger.inventory.inventory import Inventory
from trainledger.inventory.tensors import BoolArray
from trainledger.plans import sharding
from trainledger.plans.partition import ddp_bucket_count
from trainledger.profiles.profile import Cut


class _Side:
    """Dense tensors or routed experts: their masks, groups and shard sizes."""

    def __init__(self, inventory: Inventory, own: Shares, *, expert: bool) -> None:
        table = own.table
        chosen = table.expert if expert else ~table.expert
        self.setting = inventory.setting
        self.own = own
        self.plans = own.plans
        self.expert = expert
        self.trained: BoolArray = chosen & table.trainable
        self.all: BoolArray = chosen
        self.name = "expert_dp" if expert else "dp"
        self.shard_name = "expert_dp_shard" if expert else "dp_shard"
        self.group = sharding.expert_group(own.plans) if expert else sharding.dense_group(own.plans)
        self.shard = own.expert if expert else own.dense
        self.replicas = own.plans.dp_replicate
        self.stage = self.plans.zero_stage
        self.batches = self.plans.num_microbatches[:, None]

    def whole(self, mask: BoolArray, cut: Cut) -> IntArray:
        """[plans, rows]: elements of the padded whole, a multiple of the shard group."""
        return shares_elements(self.own, mask, cut) * self.shard[:, None]

    def units(self, mask: BoolArray) -> IntArray:
        """[plans, rows]: separately gathered units of the masked tensors: blocks, embedding, what follows the last."""
        return self.own.times(mask)

    def once(self, *stages: int) -> IntArray:
        """[plans, 1]: 1 under the named zero_stages."""
        return one_of(self.stage, stages, 4)[:, None].astype(np.int64)

    def calls(self, op: Op, what: str, dtype: str, count: IntArray, size: IntArray, cite: str) -> Collective:
        """Over the sharding ranks for gathers and scatters, over all averaging ranks for all-reduces."""
        if op == "all_reduce":
            return collective("all_reduce", self.name, what, dtype, self.group, count, size, cite)
        return collective(op, self.shard_name, what, dtype, self.shard, count, size, cite)

    def across(self, dtype: str, count: IntArray, total: IntArray, cite: str) -> Collective:
        """The all-reduce of shards over their replicas (HSDP, several optimizer instances); `total` is of the whole."""
        shards = total // self.shard[:, None]
        return summed("all_reduce", "dp_replicate", "gradient shards", dtype, self.replicas, count, shards, cite)

    def fixed(self, op: Op, what: str, dtype: str, count: IntArray, total: IntArray, cite: str) -> Collective:
        """Calls that differ in size, over the sharding ranks; `total` bytes of the whole side of all of them."""
        return summed(op, self.shard_name, what, dtype, self.shard, count, total, cite)

    def averaged(self, what: str, dtype: str, count: IntArray, total: IntArray, cite: str) -> Collective:
        """All-reduces that differ in size, over all ranks that average."""
        return summed("all_reduce", self.name, what, dtype, self.group, count, total, cite)


def data_traffic(inventory: Inventory, own: Shares) -> list[Collective]:
    """Data-parallel collectives of one optimizer step."""
    styles: dict[str, Callable[[_Side], Iterator[Collective]]] = {
        "paper": _paper,
        "ddp_fsdp2": _ddp_fsdp2,
        "deepspeed": _deepspeed,
        "megatron": _megatron,
    }
    style = styles[inventory.setting.profile.traffic.style]
    sides = [_Side(inventory, own, expert=False)]
    if own.table.expert.any():
        sides.append(_Side(inventory, own, expert=True))
    return [call for side in sides for call in style(side)]


def _paper(side: _Side) -> Iterator[Collective]:
    """ZeRO: all-reduce | scatter + gather | a scatter per micro-batch | 2 gathers + 1 scatter each. [zero-paper: 7]"""
    grad, gathered = side.setting.dtype("reduce"), side.setting.dtype("gathered")
    ones = np.ones_like(side.own.pp_stage)
    grads = bytes_of(side.whole(side.trained, "even"), grad)
    scatters = side.once(1) + side.once(2, 3) * side.batches
    yield side.calls("all_reduce", "gradients", grad, side.once(0) * ones, grads, "zero-paper")
    yield side.calls("reduce_scatter", "gradients", grad, scatters * ones, grads, "zero-paper")
    sharded = side.once(1, 2, 3) * ones
    yield side.across(grad, sharded, sharded * grads, "zero-paper")
    if (updated := side.once(1, 2)).any():
        size = bytes_of(side.whole(side.trained, "even"), gathered)
        yield side.calls("all_gather", "updated weights", gathered, updated * ones, size, "zero-paper")
    if (gathers := side.once(3)).any():
        size = _gathered_bytes(side, gathered, "even")
        yield side.calls("all_gather", "weights", gathered, 2 * gathers * side.batches * ones, size, "zero-paper")


def _ddp_fsdp2(side: _Side) -> Iterator[Collective]:
    """DDP, or replicas unit by unit, at stage 0; FSDP2 units otherwise. [fsdp2-knobs, torchtitan-reshard]"""
    setting = side.setting
    reduce = setting.dtype("reduce")
    rules = setting.profile.traffic
    deferred = (side.plans.pp > 1)[:, None] * int(rules.pipeline_keeps_gathered)
    if (replicated := side.once(0)).any():
        yield _replicated(side, replicated, deferred)
    if not side.once(1, 2, 3).any():
        return
    yield _gathered(side, side.once(3) * deferred)
    scatters = side.once(1) + side.once(2, 3) * np.where(deferred, 1, side.batches)
    total = scatters * bytes_of(side.whole(side.trained, "dim0"), reduce)
    calls = scatters * side.units(side.trained)
    yield side.fixed("reduce_scatter", "gradients", reduce, calls, total, "fsdp2-units")
    yield side.across(reduce, calls, total, "fsdp2-hsdp")


def _replicated(side: _Side, replicated: IntArray, deferred: IntArray) -> Collective:
    """DDP's buckets once per step; torchtitan's replicas reduce each unit after every micro-batch."""
    setting = side.setting
    if setting.profile.traffic.replicas_by_unit:
        dtype, times = setting.dtype("reduce"), replicated * np.where(deferred, 1, side.batches)
        calls = times * side.units(side.trained)
    else:
        dtype, times = setting.dtype("grad"), replicated
        calls = times * _ddp_buckets(side, dtype)
    total = times * bytes_of(shares_elements(side.own, side.trained, "none"), dtype)
    return side.averaged("gradients", dtype, calls, total, "torch-ddp")


def _gathered(side: _Side, held: IntArray) -> Collective:
    """All-gathers of weights: once per step at stages 1, 2 and where held, else twice per micro-batch."""
    gathered = side.setting.dtype("gathered")
    per_batch = (side.once(3) - held) * side.batches
    times = side.once(1, 2) + held + 2 * per_batch
    calls, total = times * side.units(side.all), times * _gathered_bytes(side, gathered, "dim0")
    if side.setting.profile.traffic.final_unit_kept:
        final = side.all & _final_unit(side)
        whole = bytes_of(side.whole(final, "dim0"), "bf16" if gathered == "fp8" else gathered)
        calls, total = calls - per_batch * side.units(final), total - per_batch * whole
    return side.fixed("all_gather", "weights", gathered, calls, total, "fsdp2-units")


def _final_unit(side: _Side) -> BoolArray:
    """What follows the last block, and a tied embedding with it: kept gathered. [torchtitan: fsdp.py 238-266]"""
    slots = side.own.table.slots
    at = side.own.table.at
    kept = slots == at.final
    return kept | (slots == at.embedding) if side.setting.model.tied else kept


def _gathered_bytes(side: _Side, gathered: str, cut: Cut) -> IntArray:
    """[plans, rows]: one gather of everything, each tensor in the dtype it travels in."""
    total = np.zeros_like(side.own.pp_stage)
    for mask, kind in gathered_parts(side.own.table, gathered):
        elements = side.whole(side.all & mask, cut)
        total = total + kept_bytes(elements, kind)
    return total


def _has_elements(side: _Side, mask: BoolArray) -> IntArray:
    return (side.own.times(mask) > 0).astype(np.int64)


def _ddp_buckets(side: _Side, dtype: str) -> IntArray:
    """[plans, rows]: all-reduces DDP issues, by its own bucketing, once per distinct list of sizes."""
    own = side.own
    sizes = bytes_of(own.shapes.numel, dtype)
    known: dict[bytes, int] = {}
    buckets = np.zeros_like(own.pp_stage)
    for plan, row in zip(*np.nonzero(_has_elements(side, side.trained) * side.once(0)), strict=True):
        times = own.held[plan, row] * side.trained
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


def _deepspeed(side: _Side) -> Iterator[Collective]:
    """Bucket all-reduces at every stage below 3, flat all-gather of weights, coalesced ZeRO-3. [deepspeed-z12, -z3]"""
    if side.once(0, 1, 2).any():
        yield from _deepspeed_z12(side)
    if side.once(3).any():
        yield from _deepspeed_z3(side)


def _deepspeed_z12(side: _Side) -> Iterator[Collective]:
    setting = side.setting
    grad, gathered = setting.dtype("reduce"), setting.dtype("gathered")
    plain = shares_elements(side.own, side.trained, "none")
    buckets = ceil_div(plain, setting.bucket_elements)
    spread = (side.plans.cp > 1)[:, None]
    cast = side.once(1) + side.once(2) * side.batches
    # with sequence parallelism stages 1 and 2 reduce in fp32 [deepspeed: stage_1_and_2.py 1847]
    for dtype, times in ((grad, side.once(0) + cast * ~spread), ("fp32", cast * spread)):
        if times.any():
            yield side.averaged("gradients", dtype, times * buckets, times * bytes_of(plain, dtype), "deepspeed-z12")
    # in bf16 a pipeline at stage 0 runs BF16_Optimizer, which shards the optimizer [deepspeed: engine.py 2014-2018]
    piped = side.once(0) * (side.plans.pp > 1)[:, None] * int(setting.recipe.weight == "bf16")
    if (updated := side.once(1, 2) + piped).any():
        flat = side.whole(side.trained, "flat")
        whole = updated * bytes_of(flat, gathered)
        yield side.fixed("all_gather", "updated weights", gathered, updated * np.sign(flat), whole, "deepspeed-z12")


def _deepspeed_z3(side: _Side) -> Iterator[Collective]:
    """Two gathers and a scatter per micro-batch; parameters that stay gathered are gathered once, after the step.

    4-bit weights are whole on every rank. [deepspeed-4bit]
    """
    grad, gathered = side.setting.dtype("reduce"), side.setting.dtype("gathered")
    bucket, per_batch = side.setting.bucket_elements, side.once(3) * side.batches
    table = side.own.table
    small = table.rows * table.rest <= side.setting.profile.persistent_elements
    large = side.all & ~small & ~table.quantised
    moving = side.whole(large, "tensor")
    calls, total = 2 * per_batch * side.units(large), 2 * per_batch * bytes_of(moving, gathered)
    yield side.fixed("all_gather", "weights", gathered, calls, total, "deepspeed-z3")
    kept = side.once(3) * side.whole(side.all & small, "tensor")
    yield side.fixed(
        "all_gather", "persistent weights", gathered, np.sign(kept), bytes_of(kept, gathered), "deepspeed-z3"
    )
    trained = side.whole(side.trained, "tensor")
    calls, total = per_batch * ceil_div(trained, bucket), per_batch * bytes_of(trained, grad)
    yield side.fixed("reduce_scatter", "gradients", grad, calls, total, "deepspeed-z3")


def _megatron(side: _Side) -> Iterator[Collective]:
    """One reduction of each gradient buffer and one gather of its weights per step; Megatron-FSDP at stages 2 and 3.

    Every virtual stage has buffers of its own.
    """
    setting, trained = side.setting, side.own.table.trainable
    grad, gathered = setting.dtype("grad"), setting.dtype("gathered")
    chunks = side.plans.vpp[:, None]
    if (replicated := side.once(0)).any():
        plain = replicated * megatron_buffers(side.own, trained, padded=False)[side.expert]
        yield side.averaged("grad_data", grad, chunks * (plain > 0), bytes_of(plain, grad), "megatron-reduce")
    if (optimizer := side.once(1)).any():
        buffer = optimizer * megatron_buffers(side.own, trained, padded=True)[side.expert]
        calls, whole = chunks * (buffer > 0), bytes_of(buffer, grad)
        yield side.fixed("reduce_scatter", "grad_data", grad, calls, whole, "megatron-reduce")
        yield side.across(grad, calls, whole, "megatron-instances")
        yield side.fixed("all_gather", "param_data", gathered, calls, bytes_of(buffer, gathered), "megatron-gather")
    if side.once(2, 3).any():
        yield from _megatron_fsdp(side)


def _megatron_fsdp(side: _Side) -> Iterator[Collective]:
    """Units reduced after every micro-batch and, with replicas, across them once; gathered for each use at stage 3."""
    sharded, gathered = side.setting.dtype("sharded_grad"), side.setting.dtype("gathered")
    units, once = side.units(side.all), side.once(2, 3)
    grads = bytes_of(side.whole(side.trained, "unit"), sharded)
    times = once * side.batches
    yield side.fixed("reduce_scatter", "gradients", sharded, times * units, times * grads, "megatron-fsdp")
    yield side.across(sharded, once * units, once * grads, "megatron-fsdp")
    gathers = 2 * side.once(3) * side.batches + side.once(2)
    total = gathers * bytes_of(side.whole(side.all, "unit"), gathered)
    yield side.fixed("all_gather", "weights", gathered, gathers * units, total, "megatron-fsdp")
