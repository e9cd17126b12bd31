"""From the words of a `precision` cell to the scenario of an engine: its recipe, gradient dtype and optimizer."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

import msgspec
import numpy as np

from trainledger.account.states import state_account
from trainledger.dtypes import bits
from trainledger.facts.by_hand import model_from_count
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Scenario, make_plans
from trainledger.plans.setting import Setting, make_setting
from trainledger.profiles import load_optimizer, load_profile
from trainledger.profiles.profile import Optimizer, Profile
from trainledger.scoring.words import Dtypes, Source, Unclear, read_precision

PROBE_PARAMS = 1 << 20
"""Parameters of a model whose states are divided by their number: no block of an optimizer is cut short."""


def scenario_of(precision: str, source: Source, offload: tuple[str, ...]) -> Scenario:
    """The scenario that a row's words describe in the engine of its source; Unclear where they do not decide it."""
    text = precision or source.precision
    if not text:
        raise Unclear("precision is blank, and its source takes none for granted")
    profile = load_profile(source.engine, source.framework_version)
    said = Dtypes(dtype=text) if text in profile.precision else read_precision(text)
    recipe = said.weights or said.dtype
    if recipe not in profile.precision:
        known = ", ".join(profile.precision)
        raise Unclear(f"precision {text!r} names {recipe or 'no dtype'}; the recipes of {profile.name} are {known}")
    if said.weights and said.weights != profile.precision[recipe].weight:
        kept = profile.precision[recipe].weight
        raise Unclear(f"precision {text!r}: the {recipe} recipe of {profile.name} keeps its weights in {kept}")
    scenario = Scenario(
        engine=source.engine,
        framework_version=source.framework_version,
        precision=recipe,
        grad_dtype=said.gradients,
        offload=offload,
    )
    return msgspec.structs.replace(scenario, optimizer=_optimizer(text, said, scenario, profile))


def _optimizer(text: str, said: Dtypes, scenario: Scenario, profile: Profile) -> str:
    """The first of the engine's optimizers that is all the row says of it."""
    known = [name for name in profile.optimizers if _decided_by_count(load_optimizer(name))]
    for name in known:
        if _fits(said, _setting(msgspec.structs.replace(scenario, optimizer=name, offload=()))):
            return name
    stated = ((said.optimizer, "it is {}"), (said.k, "it keeps {} bytes a parameter"), (said.moments, "moments {}"))
    more = ((said.master, "master copy {}"), ("precision-aware" if said.aware else "", "it is {}"))
    wanted = "; ".join(words.format(value) for value, words in (*stated, *more) if value)
    raise Unclear(
        f"precision {text!r}: of the optimizers of {profile.name} that a parameter count decides, {', '.join(known)}, "
        f"none is all of this: {wanted}"
    )


def _decided_by_count(optimizer: Optimizer) -> bool:
    """Whether what it keeps depends on the parameter count alone, not on which tensors are matrices."""
    return all(moment.layout != "factored" and moment.select == "all" for moment in optimizer.moments)


def _fits(said: Dtypes, setting: Setting) -> bool:
    name = setting.scenario.optimizer
    if said.optimizer and name.partition("-")[0] != said.optimizer:
        return False
    if said.aware and name not in setting.profile.optimizer_master:
        return False
    if said.moments and set(_moments(setting)) != {said.moments}:
        return False
    if said.master and said.master not in (setting.dtype("master"), _completed(setting)):
        return False
    return said.k is None or optimizer_bytes(setting.scenario) == Fraction(said.k)


def _moments(setting: Setting) -> tuple[str, ...]:
    stepped = setting.dtype("stepped")
    return tuple(stepped if m.dtype == "master" else m.dtype for m in setting.optimizer.moments)


def _completed(setting: Setting) -> str:
    """The dtype that 16-bit weights make up together with the low half that the optimizer keeps."""
    low_half = setting.dtype("master") == "int16"
    return "fp32" if low_half and bits(setting.recipe.weight) + bits("int16") == bits("fp32") else ""


@lru_cache(maxsize=256)
def optimizer_bytes(scenario: Scenario) -> Fraction:
    """Bytes per parameter that the optimizer keeps, undivided: the K of the ZeRO paper, by the account.

    >>> optimizer_bytes(Scenario(engine="paper", precision="fp16"))
    Fraction(12, 1)
    """
    account = state_account(Inventory(_setting(scenario)), make_plans({"zero_stage": 0}))
    return Fraction(int(np.max(account.held["optimizer", "rest"])), PROBE_PARAMS)


def _setting(scenario: Scenario) -> Setting:
    return make_setting(model_from_count(PROBE_PARAMS), Workload(), scenario, largest_module_params=1)
