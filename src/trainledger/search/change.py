"""The smallest single change that makes a plan fit, tried from the cheapest knob to the dearest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import msgspec
import numpy as np

from trainledger.account.activations import activation_bytes
from trainledger.account.ledger import peak_totals
from trainledger.account.states import state_account
from trainledger.arrays import ints
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Plans, make_plans
from trainledger.plans.setting import Setting, make_setting
from trainledger.rules import REFUSALS, passing

MOST_GPUS_FACTOR = 1024


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Turn one knob from one value to another, and this is what the plan then holds."""

    knob: str
    before: str
    after: str
    total_bytes: int


KNOBS = ("mbs", "recompute", "zero", "tp", "pp", "cp", "optimizer", "offload", "gpus")
"""From the cheapest to the dearest."""


def cost_of(change: Change) -> tuple[int, int]:
    """Sorts changes: the cheapest knob first; of more GPUs the fewest, else what leaves most memory."""
    return KNOBS.index(change.knob), int(change.after) if change.knob == "gpus" else change.total_bytes


def smallest_change(setting: Setting, plans: Plans) -> Change | None:
    """The first change, in order of cost, whose plan passes every rule and fits; None where none does.

    Order: smaller micro-batch, recompute, higher zero_stage, splitting the same GPUs more, a leaner optimizer,
    offload, and at last more GPUs.
    """
    usable = setting.accelerator.usable_bytes if setting.accelerator is not None else 0
    for knob, before, after, changed, rows in _changes(setting, plans):
        legal = passing(REFUSALS, changed, rows)
        if not legal.any():
            continue
        inventory = Inventory(changed)
        chosen = rows.take(np.nonzero(legal)[0])
        total = peak_totals(state_account(inventory, chosen), activation_bytes(inventory, chosen))
        fits = np.nonzero(total <= usable)[0]
        if len(fits):
            named = np.array(after)[legal][fits[0]]
            return Change(knob=knob, before=before, after=str(named), total_bytes=int(total[fits[0]]))
    return None


def _changes(setting: Setting, plans: Plans) -> Iterator[tuple[str, str, list[str], Setting, Plans]]:
    """(knob, before, values, setting, one row per value), cheapest knob first."""
    row = plans.row(0)
    scenario = setting.scenario
    yield from _column(setting, row, "mbs", [row["mbs"] // 2**k for k in range(1, row["mbs"].bit_length())])
    if scenario.recompute != "full":
        yield "recompute", scenario.recompute, ["full"], _with(setting, recompute="full"), plans
    yield from _column(setting, row, "zero_stage", list(range(row["zero_stage"] + 1, 4)))
    for axis in ("tp", "pp", "cp"):
        dp = row["dp_shard"]
        yield from _column(setting, row, axis, [row[axis] * 2**k for k in range(1, dp.bit_length()) if dp % 2**k == 0])
    for optimizer in ("adamw-bf16", "adamw-8bit"):
        if optimizer in setting.profile.optimizers and scenario.optimizer == "adamw":
            yield "optimizer", "adamw", [optimizer], _with(setting, optimizer=optimizer), plans
    for place in setting.profile.offload:
        if place not in scenario.offload:
            offload = (*scenario.offload, place)
            before = ",".join(scenario.offload) or "none"
            yield "offload", before, [",".join(offload)], _with(setting, offload=offload), plans
    factors = range(2, MOST_GPUS_FACTOR + 1)
    grown = make_plans({**row, "dp_shard": [row["dp_shard"] * f for f in factors]})
    gpus = int(plans.gpus[0])
    yield "gpus", str(gpus), [str(gpus * f) for f in factors], setting, grown


def _column(
    setting: Setting, row: dict[str, int], name: str, values: list[int]
) -> Iterator[tuple[str, str, list[str], Setting, Plans]]:
    """One integer column; the data-parallel degree gives way, so that the number of GPUs stays."""
    if not values:
        return
    changed: dict[str, object] = {**row, name: values}
    if name in ("tp", "pp", "cp"):
        changed["dp_shard"] = [row["dp_shard"] * row[name] // value for value in values]
    if name == "tp":
        changed["sp"] = 1
        follows = setting.profile.etp_default != "1"
        changed["etp"] = setting.profile.default_etp(ints(values), ints(row["ep"])) if follows else row["etp"]
    if name == "mbs":
        changed["num_microbatches"] = [row["num_microbatches"] * row["mbs"] // value for value in values]
    knob = "zero" if name == "zero_stage" else name
    yield knob, str(row[name]), [str(v) for v in values], setting, make_plans(changed)


def _with(setting: Setting, **scenario: object) -> Setting:
    return dataclasses.replace(
        make_setting(
            setting.model,
            setting.workload,
            msgspec.structs.replace(setting.scenario, **scenario),
            accelerator=setting.accelerator,
            cluster=setting.cluster,
            largest_module_params=setting.largest_module_params,
        )
    )
