"""Data-parallel traffic: what gradients and sharded weights cost in one optimizer step, by engine.

Each style is a function Shares -> collectives. Bytes include the padding that the engine's cut adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from trainledger.account.shares import Shares, megatron_buffers, shares_elements
from trainledger.account.traffic.collectives import Collective
from trainledger.account.traffic.flat_units import flat_unit_traffic
from trainledger.account.traffic.side import Side
from trainledger.account.traffic.units import unit_traffic
from trainledger.arrays import IntArray, ceil_div
from trainledger.dtypes import bytes_of, kept_bytes
from trainledger.inventory.buffers import gathered_parts
from trainledger.inventory.inventory import Inventory


def data_traffic(inventory: Inventory, own: Shares) -> list[Collective]:
    """Data-parallel collectives of one optimizer step."""
    name = inventory.setting.profile.traffic.style
    if name == "ddp_fsdp2":
        return list(unit_traffic(inventory, own))
    if name == "fsdp1":
        return list(flat_unit_traffic(inventory, own))
    styles: dict[str, Callable[[Side], Iterator[Collective]]] = {
        "paper": _paper,
        "deepspeed": _deepspeed,
        "megatron": _megatron,
        "nanotron": _nanotron,
    }
    sides = [Side(inventory, own, expert=False)]
    if own.table.expert.any():
        sides.append(Side(inventory, own, expert=True))
    return [call for side in sides for call in styles[name](side)]


def _paper(side: Side) -> Iterator[Collective]:
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
        size = _gathered_bytes(side, gathered)
        yield side.calls("all_gather", "weights", gathered, 2 * gathers * side.batches * ones, size, "zero-paper")


def _gathered_bytes(side: Side, gathered: str) -> IntArray:
    """[plans, rows]: one gather of everything, each tensor in the dtype it travels in."""
    total = np.zeros_like(side.own.pp_stage)
    for mask, kind in gathered_parts(side.own.table, gathered):
        total = total + kept_bytes(side.whole(side.all & mask, "even"), kind)
    return total


def _deepspeed(side: Side) -> Iterator[Collective]:
    """Bucket all-reduces at every stage below 3, flat all-gather of weights, coalesced ZeRO-3. [deepspeed-z12, -z3]"""
    if side.once(0, 1, 2).any():
        yield from _deepspeed_z12(side)
    if side.once(3).any():
        yield from _deepspeed_z3(side)


def _deepspeed_z12(side: Side) -> Iterator[Collective]:
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


def _deepspeed_z3(side: Side) -> Iterator[Collective]:
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


def _megatron(side: Side) -> Iterator[Collective]:
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


def _megatron_fsdp(side: Side) -> Iterator[Collective]:
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


def _nanotron(side: Side) -> Iterator[Collective]:
    """One all-reduce of the whole fp32 buffer and one gather of all updated weights, each once per step.

    Scattering instead is left out by the engine, for it needed more memory. [nanotron-states]
    """
    grad, gathered = side.setting.dtype("reduce"), side.setting.dtype("gathered")
    buffer = shares_elements(side.own, side.trained, "none")
    yield side.averaged("fp32 gradients", grad, np.sign(buffer), bytes_of(buffer, grad), "nanotron-states")
    updated = side.whole(side.trained, "tensor")
    yield side.fixed(
        "all_gather", "updated weights", gathered, np.sign(updated), bytes_of(updated, gathered), "nanotron-states"
    )
