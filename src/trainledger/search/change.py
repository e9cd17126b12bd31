"""The smallest single change that makes a plan fit, tried from the cheapest knob to the dearest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import numpy as np

from trainledger.account.memory import device_bytes, stage_memory
from trainledger.account.peak import host_holds
from trainledger.arrays import first_that, ints
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Plans, make_plans, num_microbatches
from trainledger.plans.setting import Setting
from trainledger.rules import REFUSALS, passing

MOST_GPUS_FACTOR = 1024
"""A plan that needs a thousand times the GPUs is not one change away."""
MANY = 20
"""More values than any degree has doublings."""
SPLITTING = ("tp", "pp", "cp")
"""Axes that cut a rank's part of the model, from the cheapest to the dearest."""
LEANER_LOSSES = ("fused", "native-fused", "compiled", "chunked")
"""Ways to compute a loss that are switched on, and hold fewer copies of the logits, or a part of them at a time."""
LEANER = ("adamw-bf16", "adamw-8bit")
"""What may stand in for AdamW, from the nearest to it on."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Turn one knob from one value to another, and this is what the plan then holds.

    plan, recompute   the plan after the change
    """

    knob: str
    before: str
    after: str
    total_bytes: int
    plan: dict[str, int]
    recompute: str


KNOBS = ("mbs", "recompute", "loss", "zero", "tp", "pp", "cp", "optimizer", "offload", "gpus")
"""From the cheapest to the dearest."""


def cost_of(change: Change) -> tuple[int, int]:
    """Sorts changes: the cheapest knob first; of more GPUs the fewest, else what leaves most memory."""
    return KNOBS.index(change.knob), int(change.after) if change.knob == "gpus" else change.total_bytes


def smallest_change(setting: Setting, plans: Plans, gbs: int, *, known: Change | None = None) -> Change | None:
    """The first change, in order of cost, whose plan passes every rule and fits; None where none does.

    Order: smaller micro-batch, recompute, a leaner loss, higher zero_stage, splitting the same GPUs more, a leaner
    optimizer, offload, and at last more GPUs. `gbs` is the global batch of the plan; where the workload names none, it
    was assumed, and grows with the job. Knobs that are dearer than that of a change which is `known` are not turned.
    """
    usable = setting.usable_bytes or 0
    for knob, before, after, changed, rows in _changes(setting, plans, gbs):
        if known is not None and KNOBS.index(knob) > KNOBS.index(known.knob):
            return None
        legal = np.nonzero(passing(REFUSALS, changed, rows))[0]
        if len(legal) == 0:
            continue
        chosen = rows.take(legal)
        inventory = Inventory(changed)
        memory = stage_memory(inventory, chosen)
        # what the allocator reserves beside is asked of those alone that fit without it
        likely = np.nonzero((memory.device <= usable) & host_holds(changed, chosen, memory))[0].tolist()
        first = _first(likely, partial(_fits, inventory, chosen, usable))
        if first >= 0:
            return Change(
                knob=knob,
                before=before,
                after=after[int(legal[first])],
                total_bytes=int(memory.allocated[first]),
                plan=chosen.row(first),
                recompute=changed.scenario.recompute,
            )
    return None


def _fits(inventory: Inventory, plans: Plans, usable: int, row: int) -> bool:
    """Whether a plan fits with what the allocator reserves, which takes a replay of its run."""
    return device_bytes(inventory, plans.take(ints(row)), usable=usable) <= usable


def _first(rows: list[int], fits: Callable[[int], bool]) -> int:
    """The first row that fits, -1 where none does.

    Where there are many, only GPUs differ, and each holds no more than the one before it.
    """
    if len(rows) <= MANY:
        return next((row for row in rows if fits(row)), -1)
    found = first_that(lambda index: fits(rows[index]), len(rows))
    return rows[found] if found < len(rows) else -1


def _changes(setting: Setting, plans: Plans, gbs: int) -> Iterator[tuple[str, str, list[str], Setting, Plans]]:
    """(knob, before, values, setting, one row per value), cheapest knob first."""
    row = plans.row(0)
    scenario = setting.scenario
    halves = [row["mbs"] // 2**k for k in range(1, row["mbs"].bit_length())]
    yield from _column(setting, row, "mbs", halves, gbs)
    if scenario.recompute != "full":
        yield "recompute", scenario.recompute, ["full"], setting.under(recompute="full"), plans
    now = setting.loss_word(cut=row["tp"] > 1)
    for loss in LEANER_LOSSES:
        if loss in setting.profile.memory.losses and loss != now:
            yield "loss", now, [loss], setting.under(loss=loss), plans
    yield from _column(setting, row, "zero_stage", list(range(row["zero_stage"] + 1, 4)), gbs)
    dp = row["dp_shard"]
    doublings = [2**k for k in range(1, dp.bit_length()) if dp % 2**k == 0]
    for axis in SPLITTING:
        yield from _column(setting, row, axis, [row[axis] * factor for factor in doublings], gbs)
    for optimizer in LEANER:
        if optimizer in setting.profile.optimizers and scenario.optimizer == "adamw":
            yield "optimizer", "adamw", [optimizer], setting.under(optimizer=optimizer), plans
    for place in setting.profile.offload:
        if place not in scenario.offload:
            offload = (*scenario.offload, place)
            before = ",".join(scenario.offload) or "none"
            yield "offload", before, [",".join(offload)], setting.under(offload=offload), plans
    factors = ints(range(2, MOST_GPUS_FACTOR + 1))
    grown: dict[str, object] = {**row, "dp_shard": dp * factors}
    if setting.workload.gbs is not None:
        grown["num_microbatches"] = num_microbatches(gbs, row["mbs"] * row["dp_replicate"] * dp * factors)
    gpus = int(plans.gpus[0])
    yield "gpus", str(gpus), [str(gpus * factor) for factor in factors.tolist()], setting, make_plans(grown)


def _column(
    setting: Setting, row: dict[str, int], name: str, values: list[int], gbs: int
) -> Iterator[tuple[str, str, list[str], Setting, Plans]]:
    """One integer column; the data-parallel degree gives way, so that the number of GPUs stays."""
    if not values:
        return
    changed: dict[str, object] = {**row, name: values}
    shards = ints(row["dp_shard"]) * row[name] // values if name in SPLITTING else ints(row["dp_shard"])
    changed["dp_shard"] = shards
    if name == "tp":
        changed["sp"] = int("sp" in setting.profile.axes)
        follows = setting.profile.etp_default != "1"
        changed["etp"] = setting.profile.default_etp(ints(values), ints(row["ep"])) if follows else row["etp"]
    share = (ints(values) if name == "mbs" else row["mbs"]) * row["dp_replicate"] * shards
    changed["num_microbatches"] = num_microbatches(gbs, share)
    knob = "zero" if name == "zero_stage" else name
    yield knob, str(row[name]), [str(v) for v in values], setting, make_plans(changed)
