"""Data-parallel traffic: what gradients and sharded weights cost in one optimizer step, by engine.

Each style is a function Shares -> collectives. Bytes include the padding that the engine's cut adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from trainledger.account.collectives import Collective, collective
from trainledger.account.states import Shares, shares_elements
from trainledger.arrays import IntArray, ceil_div, one_of
from trainledger.dtypes import bytes_of
from trainledger.inventory.inventory import Inventory
from trainledger.inventory.tensors import BoolArray
from trainledger.plans import sharding
from trainledger.plans.partition import ddp_bucket_count


class _Side:
    """Dense tensors or routed experts: their masks, groups and shard sizes."""

    def __init__(self, inventory: Inventory, own: Shares, *, expert: bool) -> None:
        table = own.table
        chosen = table.expert if expert else ~table.expert
        self.setting = inventory.setting
        self.own = own
        self.plans = own.plans
        self.trained: BoolArray = chosen & table.trainable
        self.all: BoolArray = chosen
        self.name = "expert_dp" if expert else "dp"
        self.shard_name = "expert_dp_shard" if expert else "dp_shard"
        self.group = sharding.expert_group(own.plans) if expert else sharding.dense_group(own.plans)
        self.shard = own.expert if expert else own.dense
        self.replicas = own.plans.dp_replicate
        self.stage = self.plans.zero_stage
        self.batches = self.plans.num_microbatches[:, None]

    def whole(self, mask: BoolArray, cut: str) -> IntArray:
        """[plans, rows]: elements of the padded whole, a multiple of the shard group."""
        return shares_elements(self.own, mask, cut) * self.shard[:, None]

    def units(self) -> IntArray:
        """[plans, rows]: separately gathered units: blocks, the embedding, what follows the last block."""
        holds = self.own.held * self.all
        slots = self.own.table.slots
        per_slot = [np.max(holds[:, :, slots == s], axis=2) for s in np.unique(slots[self.all])]
        return sum(per_slot, start=np.zeros_like(self.own.pp_stage))

    def once(self, *stages: int) -> IntArray:
        """[plans, 1]: 1 under the named zero_stages."""
        return one_of(self.stage, stages, 4)[:, None].astype(np.int64)

    def calls(self, op: str, what: str, dtype: str, count: IntArray, size: IntArray, cite: str) -> Collective:
        """Over the sharding ranks for gathers and scatters, over all averaging ranks for all-reduces."""
        if op == "all_reduce":
            return collective("all_reduce", self.name, what, dtype, self.group, count, size, cite)
        return collective(op, self.shard_name, what, dtype, self.shard, count, size, cite)  # type: ignore[arg-type]

    def across(self, dtype: str, count: IntArray, whole: IntArray, cite: str) -> Collective:
        """The all-reduce of each shard over its replicas (HSDP, several optimizer instances)."""
        shard = whole // self.shard[:, None]
        return collective("all_reduce", "dp_replicate", "gradient shards", dtype, self.replicas, count, shard, cite)


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
    """ZeRO: all-reduce | reduce-scatter + all-gather | scatter per micro-batch | 2 gathers + 1 scatter. [zero-paper: 7]"""
    grad, gathered = side.setting.dtype("reduce"), side.setting.dtype("gathered")
    ones = np.ones_like(side.own.pp_stage)
    grads = bytes_of(side.whole(side.trained, "even"), grad)
    scatters = side.once(1) + side.once(2, 3) * side.batches
    yield side.calls("all_reduce", "gradients", grad, side.once(0) * ones, grads, "zero-paper")
    yield side.calls("reduce_scatter", "gradients", grad, scatters * ones, grads, "zero-paper")
    yield side.across(grad, side.once(1, 2, 3) * ones, grads, "zero-paper")
    if (updated := side.once(1, 2)).any():
        size = bytes_of(side.whole(side.trained, "even"), gathered)
        yield side.calls("all_gather", "updated weights", gathered, updated * ones, size, "zero-paper")
    if (gathers := side.once(3)).any():
        size = bytes_of(side.whole(side.all, "even"), gathered)
        yield side.calls("all_gather", "weights", gathered, 2 * gathers * side.batches * ones, size, "zero-paper")


def _ddp_fsdp2(side: _Side) -> Iterator[Collective]:
    """DDP at stage 0; FSDP2 units otherwise. [fsdp2-knobs, torchtitan-reshard]"""
    setting, plans = side.setting, side.plans
    reduce, gathered = setting.dtype("reduce"), setting.dtype("gathered")
    grad = setting.dtype("grad")
    ones = np.ones_like(side.own.pp_stage)
    replicated = side.once(0) * _has_elements(side, side.trained)
    if replicated.any():
        sizes = bytes_of(shares_elements(side.own, side.trained, "none"), grad)
        buckets = np.maximum(_ddp_buckets(side, grad), 1)
        yield _averaged(side, grad, replicated * buckets, replicated * sizes)
    if not side.once(1, 2, 3).any():
        return
    units = side.units()
    rules = setting.profile.traffic
    held = side.once(3) * (plans.pp > 1)[:, None] * int(rules.pipeline_keeps_gathered) * ones
    per_batch = (side.once(3) - held) * side.batches
    gathers = (side.once(1, 2) + held + 2 * per_batch) * _has_elements(side, side.all)
    deferred = side.once(2, 3) * (plans.pp > 1)[:, None] * int(rules.pipeline_keeps_gathered)
    scatters = side.once(1) + deferred + (side.once(2, 3) - deferred) * side.batches
    scatters = scatters * _has_elements(side, side.trained)
    grads = bytes_of(side.whole(side.trained, "dim0"), reduce)
    calls, total = gathers * units, gathers * _gathered_bytes(side, gathered)
    if rules.final_unit_kept:
        final = _final_unit_bytes(side, gathered)
        calls, total = calls - per_batch * (final > 0), total - per_batch * final
    yield _fixed(side, "all_gather", gathered, calls, total)
    yield _fixed(side, "reduce_scatter", reduce, scatters * units, scatters * grads)
    yield side.across(reduce, scatters * units, grads // np.maximum(units, 1), "fsdp2-hsdp")


def _fixed(side: _Side, op: str, dtype: str, count: IntArray, total: IntArray) -> Collective:
    """A collective whose total bytes are known and whose calls differ in size."""
    active = (side.shard > 1)[:, None]
    total, count = total * active, count * active
    part = total // side.shard[:, None]
    gather = op == "all_gather"
    return Collective(
        op=op,  # type: ignore[arg-type]
        group=side.shard_name,
        what="weights" if gather else "gradients",
        dtype="uint8" if dtype == "fp8" else dtype,
        ranks=side.shard,
        count=count,
        in_bytes=part if gather else total,
        out_bytes=total if gather else part,
        cite="fsdp2-units",
    )


def _averaged(side: _Side, dtype: str, count: IntArray, total: IntArray) -> Collective:
    active = (side.group > 1)[:, None]
    return Collective(
        op="all_reduce",
        group=side.name,
        what="gradients",
        dtype=dtype,
        ranks=side.group,
        count=count * active,
        in_bytes=total * active,
        out_bytes=total * active,
        cite="torch-ddp",
    )


def _gathered_bytes(side: _Side, gathered: str) -> IntArray:
    """FP8 gathers carry the weight matrices in one byte and the rest in bf16. [torchao-fp8-gather]"""
    if gathered != "fp8":
        return bytes_of(side.whole(side.all, "dim0"), gathered)
    matrices = side.all & side.own.table.linear
    rest = side.all & ~side.own.table.linear
    return bytes_of(side.whole(matrices, "dim0"), "fp8") + bytes_of(side.whole(rest, "dim0"), "bf16")


def _final_unit_bytes(side: _Side, gathered: str) -> IntArray:
    final = side.own.table.slots == side.own.table.num_slots - 3
    dtype = "bf16" if gathered == "fp8" else gathered
    return bytes_of(side.whole(side.all & final, "dim0"), dtype)


def _has_elements(side: _Side, mask: BoolArray) -> IntArray:
    return ((side.own.held * mask).sum(axis=2) > 0).astype(np.int64)


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
    grad, gathered = side.setting.dtype("reduce"), side.setting.dtype("gathered")
    ones = np.ones_like(side.own.pp_stage)
    bucket = side.setting.profile.traffic.bucket_elements
    if (reductions := side.once(0, 1) + side.once(2) * side.batches).any():
        plain = shares_elements(side.own, side.trained, "none")
        yield _averaged(side, grad, reductions * ceil_div(plain, bucket), reductions * bytes_of(plain, grad))
    if (updated := side.once(1, 2)).any():
        flat = bytes_of(side.whole(side.trained, "flat"), gathered)
        yield side.calls("all_gather", "updated weights", gathered, updated * ones, flat, "deepspeed-z12")
    if (per_batch := side.once(3) * side.batches * ones).any():
        whole, trained = side.whole(side.all, "tensor"), side.whole(side.trained, "tensor")
        weights = 2 * per_batch * bytes_of(whole, gathered)
        yield _fixed(side, "all_gather", gathered, 2 * per_batch * side.units(), weights)
        buckets = per_batch * ceil_div(trained, bucket)
        yield _fixed(side, "reduce_scatter", grad, buckets, per_batch * bytes_of(trained, grad))


def _megatron(side: _Side) -> Iterator[Collective]:
    """One reduction of the gradient buffer and one gather of the weights per step; Megatron-FSDP for stages 2 and 3."""
    setting = side.setting
    grad, gathered, sharded = setting.dtype("grad"), setting.dtype("gathered"), setting.dtype("sharded_grad")
    ones = _has_elements(side, side.trained)
    if (replicated := side.once(0)).any():
        plain = bytes_of(shares_elements(side.own, side.trained, "none"), grad)
        yield side.calls("all_reduce", "grad_data", grad, replicated * ones, plain, "megatron-reduce")
    if (optimizer := side.once(1)).any():
        buffer, once = side.whole(side.trained, "bucket"), optimizer * ones
        yield side.calls("reduce_scatter", "grad_data", grad, once, bytes_of(buffer, grad), "megatron-reduce")
        yield side.across(grad, once, bytes_of(buffer, grad), "megatron-instances")
        yield side.calls("all_gather", "param_data", gathered, once, bytes_of(buffer, gathered), "megatron-gather")
    if (batches := side.once(2, 3) * side.batches * ones).any():
        units = side.units()
        whole, trained = side.whole(side.all, "unit"), side.whole(side.trained, "unit")
        yield _fixed(side, "reduce_scatter", sharded, batches * units, batches * bytes_of(trained, sharded))
        gathers = (2 * side.once(3) * side.batches + side.once(2)) * ones
        yield _fixed(side, "all_gather", gathered, gathers * units, gathers * bytes_of(whole, gathered))
