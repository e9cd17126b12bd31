"""How far a plan can be stretched on its card: the largest micro-batch, the longest sequence, the most parameters.

Each is a search along whole multiples of one number, whose memory does not fall as it rises.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import msgspec
import numpy as np

from trainledger.account.memory.meters import device_bytes
from trainledger.account.memory.stage import stage_memory
from trainledger.account.peak import host_holds
from trainledger.arrays import ints
from trainledger.errors import TrainledgerError
from trainledger.facts.by_hand import model_from_count
from trainledger.inventory.inventory import Inventory
from trainledger.inventory.tensors import BoolArray
from trainledger.plans.plan import Plans, make_plans
from trainledger.plans.setting import Setting
from trainledger.rules import REFUSALS, passing

SEQ_STEP = 256
"""Lengths are told in multiples of this, and of what context and sequence parallelism divide."""
MOST_TOKENS = 1 << 32
"""Of one micro-batch: beyond any run, and far from what could not be counted."""
MOST_PARAMS = 1 << 50

REFUSED = 1 << 62
"""What a value that no rule lets pass is taken to hold."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The largest values with which a plan fits, all else as it is; 0 where none does, None where it has no tokens.

    largest_mbs   of those that divide the global batch, where one is given
    longest_seq   a multiple of 256 and of what the ranks of a sequence need
    """

    largest_mbs: int | None
    longest_seq: int | None


def limits(inventory: Inventory, plans: Plans) -> Limits:
    """Of a Plans of length one, on a card."""
    setting = inventory.setting
    if setting.model.states_alone or not setting.profile.activations:
        return Limits(largest_mbs=None, longest_seq=None)
    return Limits(largest_mbs=largest_mbs(inventory, plans), longest_seq=longest_seq(inventory, plans))


def largest_mbs(inventory: Inventory, plans: Plans) -> int:
    """The largest micro-batch; with a global batch its micro-batches become fewer."""
    setting, row = inventory.setting, plans.row(0)
    if setting.workload.gbs is None:
        most = max(MOST_TOKENS // setting.workload.seq, 1)
        return _largest(lambda mbs: (inventory, _replaced(row, mbs)), _usable(setting), row["mbs"], most)
    share = setting.workload.gbs // (row["dp_replicate"] * row["dp_shard"])
    sizes = ints(_divisors(share))
    grown = make_plans({**row, "mbs": sizes, "num_microbatches": share // sizes})
    fitting = np.sort(sizes[_fits(inventory, grown)])[::-1].tolist()
    usable = _usable(setting)
    fits = (mbs for mbs in fitting if device_bytes(inventory, _shared(row, mbs, share), usable=usable) <= usable)
    return next(fits, 0)


def _shared(row: dict[str, int], mbs: int, share: int) -> Plans:
    return make_plans({**row, "mbs": mbs, "num_microbatches": share // mbs})


def _replaced(row: dict[str, int], mbs: int) -> Plans:
    return make_plans({**row, "mbs": mbs})


def _divisors(number: int) -> list[int]:
    """All of them, in no order.

    >>> sorted(_divisors(12))
    [1, 2, 3, 4, 6, 12]
    """
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return list(dict.fromkeys((*small, *(number // size for size in small))))


def longest_seq(inventory: Inventory, plans: Plans) -> int:
    """The longest sequence."""
    setting, row, usable = inventory.setting, plans.row(0), _usable(inventory.setting)
    step = math.lcm(2 * row["cp"] * row["tp"], SEQ_STEP)

    def longer(count: int) -> tuple[Inventory, Plans]:
        workload = msgspec.structs.replace(setting.workload, seq=count * step)
        return Inventory(dataclasses.replace(setting, workload=workload)), plans

    most = max(MOST_TOKENS // (step * row["mbs"]), 1)
    return step * _largest(longer, usable, max(setting.workload.seq // step, 1), most)


def _largest(grown: Callable[[int], tuple[Inventory, Plans]], usable: int, start: int, most: int) -> int:
    """The largest number whose plan fits with what the allocator reserves.

    That takes long to replay. So a number is looked for first without it, with as much to spare as the plan itself has
    reserved and not allocated; the search that counts starts there.
    """
    known: dict[int, int] = {}

    def held(count: int) -> int:
        if count not in known:
            known[count] = _held(*grown(count), usable)
        return known[count]

    def least(count: int) -> int:
        return _least(*grown(count))

    spare = held(start) - least(start) if held(start) <= usable else 0
    return largest(held, usable, max(largest(least, usable - spare, start, most), 1), most)


def most_params(setting: Setting, plans: Plans, usable: int) -> int:
    """The largest count of parameters whose states fit `usable` bytes, tp x pp ranks holding equal parts of them.

    A count has no tensors that ranks could share, so one part is asked for, and as many make the model. [zero-paper:
    table 2]
    """
    row = plans.row(0)
    parts = row["tp"] * row["pp"]
    alone = make_plans({**row, "tp": 1, "pp": 1, "vpp": 1, "etp": 1, "sp": 0})

    def held(count: int) -> int:
        return _held(Inventory(dataclasses.replace(setting, model=model_from_count(count))), alone, usable)

    return parts * largest(held, usable, 1 << 30, MOST_PARAMS)


def largest(held: Callable[[int], int], usable: int, start: int, most: int) -> int:
    """The largest number from 1 to `most` that holds no more than `usable`; 0 where 1 holds more.

    `held` does not fall. It is nearly straight, so the next number to try is where a straight line would be full.

    >>> largest(lambda count: 7 * count + 100, 1000, 3, 1 << 20)
    128
    """
    low, low_held = 0, 0
    high = min(max(start, 1), most)
    high_held = held(high)
    while high_held <= usable:
        if high == most:
            return most
        low, low_held = high, high_held
        high = min(2 * high, most)
        high_held = held(high)
    halving = False
    while high - low > 1:
        middle = (low + high) // 2
        if not halving and low and high_held < REFUSED:
            middle = low + (high - low) * (usable - low_held) // (high_held - low_held)
        middle = min(max(middle, low + 1), high - 1)
        width, now = high - low, held(middle)
        if now <= usable:
            low, low_held = middle, now
        else:
            high, high_held = middle, now
        # a line that meets a bend closes in from one side alone
        halving = 2 * (high - low) > width and not halving
    return low


def _usable(setting: Setting) -> int:
    if setting.usable_bytes is None:
        raise AssertionError("limits are those of a card")
    return setting.usable_bytes


def _held(inventory: Inventory, plans: Plans, usable: int) -> int:
    """Bytes that the device meter shows of a single plan; REFUSED where a rule or the host forbids it.

    What the allocator reserves is asked only of what fits without it.
    """
    least = _least(inventory, plans)
    return least if least > usable else max(device_bytes(inventory, plans), least)


def _least(inventory: Inventory, plans: Plans) -> int:
    """The same without what the allocator reserves beside."""
    try:
        if not passing(REFUSALS, inventory.setting, plans)[0]:
            return REFUSED
        memory = stage_memory(inventory, plans)
    except TrainledgerError:
        # what cannot be counted is more than any card has
        return REFUSED
    return int(memory.device[0]) if host_holds(inventory.setting, plans, memory)[0] else REFUSED


def _fits(inventory: Inventory, plans: Plans) -> BoolArray:
    """[plans]."""
    memory = stage_memory(inventory, plans)
    held = (memory.device <= _usable(inventory.setting)) & host_holds(inventory.setting, plans, memory)
    return np.asarray(held & passing(REFUSALS, inventory.setting, plans))
