"""The three batch sizes of DeepSpeed, of which one follows from the others and the data-parallel degree.

[deepspeed: runtime/config.py 925-990, _set_batch_related_parameters and _batch_assertion]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from trainledger.adapters.settings import Conflict, Values
from trainledger.checklist.check import Evidence

TRAIN, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
SOURCE = "DeepSpeed runtime/config.py 925-937 at edaa722"


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What the sizes come to.

    plan     mbs, gbs and gpus, where they follow
    flags    what each key became
    lacking  keys that are auto and that no flag fills, with the flag
    """

    plan: dict[str, int]
    flags: dict[str, str]
    lacking: tuple[str, ...]
    conflicts: tuple[Conflict, ...]


def batch_of(values: Values, given: Mapping[str, Any], made: Mapping[str, Any]) -> Batch:
    """The sizes of a file; the trainer's own arguments, as flags, fill what is auto."""
    micro = values.whole(MICRO, least=1) or given.get("mbs")
    steps = values.whole(ACCUMULATION, least=1)
    train = values.whole(TRAIN, least=1) or given.get("gbs")
    lacking = [f"{MICRO}: --mbs"] if micro is None and values.auto(MICRO) else []
    others = _others(given, made)
    dp, gpus = _ranks(given, others, train, micro, steps)
    plan: dict[str, int] = {} if gpus is None or given.get("gpus") is not None else {"gpus": gpus}
    if micro is None and train is not None and not lacking:
        micro = train // (dp * (steps or 1)) or None
    conflict = _conflict(train, micro, steps, dp)
    if micro is not None:
        plan["mbs"] = micro
    if conflict is not None and micro is not None:
        plan["gbs"] = micro * (steps or 1) * dp
    elif train is not None:
        plan["gbs"] = train
    elif micro is not None and steps is not None:
        plan["gbs"] = micro * steps * dp
    return Batch(
        plan=plan,
        flags={
            MICRO: f"--mbs {plan.get('mbs')}",
            ACCUMULATION: f"--gbs {plan['gbs']}" if "gbs" in plan else "one micro-batch a rank",
            TRAIN: "the rule batch-identity"
            if conflict is not None
            else f"--gbs {plan['gbs']}"
            if "gbs" in plan
            else "one micro-batch a rank",
        },
        lacking=tuple(lacking),
        conflicts=() if conflict is None else (conflict,),
    )


def _others(given: Mapping[str, Any], made: Mapping[str, Any]) -> int:
    """Ranks that share a sample."""
    product = 1
    for axis in ("tp", "pp", "cp"):
        product *= given.get(axis) or made.get(axis) or 1
    return product


def _ranks(
    given: Mapping[str, Any], others: int, train: int | None, micro: int | None, steps: int | None
) -> tuple[int, int | None]:
    """(dp, gpus): from flags, or where none says them from the three sizes."""
    gpus = given.get("gpus")
    if gpus is not None:
        return max(gpus // others, 1), gpus
    if given.get("dp") is not None:
        return given["dp"], None
    if train and micro and steps and train % (micro * steps) == 0:
        dp = train // (micro * steps)
        return dp, dp * others
    return 1, None


def _conflict(train: int | None, micro: int | None, steps: int | None, dp: int) -> Conflict | None:
    """Three sizes that do not multiply; two of them are asked by the rule of a plan."""
    if train is None or micro is None:
        return None
    times = steps if steps is not None else train // (micro * dp)
    if train == micro * times * dp or (steps is None and times > 0):
        return None
    return Conflict(
        id="batch-identity",
        severity="refuse",
        message=(f"{TRAIN} {train} is not {MICRO} {micro} x {ACCUMULATION} {times} x dp {dp} = {micro * times * dp}"),
        knob=f"set {TRAIN} to {micro * max(times, 1) * dp}, or leave it out, for it follows from the others",
        evidence=tuple(
            Evidence(line=key, amount=amount, unit="")
            for key, amount in ((TRAIN, train), (MICRO, micro), (ACCUMULATION, times), ("dp", dp))
        ),
        source=SOURCE,
    )
