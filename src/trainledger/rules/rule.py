"""The named rules that a plan must pass: one registry, a mask for many plans and a sentence for one.

A mask is True where the rule is broken. `refuse` stops the run; `warn` and `advise` are for `check` and reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from trainledger.errors import Refused
from trainledger.plans.plan import Plans
from trainledger.plans.setting import Setting

Mask = NDArray[np.bool_]
Severity = Literal["refuse", "warn", "advise"]
Scope = Literal["model", "plan", "engine", "runtime", "check"]
"""What a rule is about; those of the runtime bind only what is run, and those of check are said by that verb alone."""


class Rule(msgspec.Struct, frozen=True):
    """One rule.

    broken     (setting, plans) -> mask, True where broken; or one answer for all plans
    sentence   value, rule and knob, for a person: a text with `fields` in braces, or (setting, plan) -> text
    engines    the profiles that it speaks of; () is all
    offered    a warning that a search does not reject for, because it costs memory that is counted anyway
    """

    id: str
    severity: Severity
    scope: Scope
    source: str
    broken: Callable[[Setting, Plans], Mask | bool]
    sentence: str | Callable[[Setting, dict[str, int]], str]
    engines: tuple[str, ...] = ()
    offered: bool = False

    def mask(self, setting: Setting, plans: Plans) -> Mask:
        """[plans]: where the rule is broken."""
        spoken_of = not self.engines or setting.profile.name in self.engines
        return np.broadcast_to(np.asarray(spoken_of and self.broken(setting, plans), dtype=np.bool_), (len(plans),))

    def message(self, setting: Setting, row: dict[str, int]) -> str:
        """The sentence about one plan as integers."""
        if isinstance(self.sentence, str):
            return self.sentence.format(**fields(setting, row))
        return self.sentence(setting, row)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that one plan breaks."""

    rule: str
    severity: Severity
    message: str
    source: str


def fields(setting: Setting, row: dict[str, int]) -> dict[str, object]:
    """What a sentence may name: the plan's columns, and words of the setting."""
    scenario, workload = setting.scenario, setting.workload
    dp = row["dp_replicate"] * row["dp_shard"]
    return {
        **row,
        "dp": dp,
        "gpus": row["tp"] * row["pp"] * row["cp"] * dp,
        "expert_group": row["tp"] * row["cp"] * dp // (row["etp"] * row["ep"]),
        "model": setting.model.name,
        "layers": setting.model.num_layers,
        "engine": setting.profile.name,
        "framework": setting.profile.framework,
        "seq": workload.seq,
        "lora_rank": workload.lora_rank,
        "precision": scenario.precision,
        "optimizer": scenario.optimizer,
        "grad_dtype": scenario.grad_dtype,
        "frozen_dtype": scenario.frozen_dtype,
        "cp_comm": scenario.cp_comm,
        "offload": ",".join(scenario.offload),
        "card": setting.accelerator.name if setting.accelerator is not None else "",
        "domain": setting.cluster.scale_up_domain if setting.cluster is not None else "",
        "node": setting.cluster.gpus_per_node if setting.cluster is not None else "",
    }


def violations(rules: Iterable[Rule], setting: Setting, plans: Plans) -> dict[str, Mask]:
    """Masks of broken rules by id, rules that no plan breaks left out."""
    masks = {rule.id: rule.mask(setting, plans) for rule in rules}
    return {rule: mask for rule, mask in masks.items() if mask.any()}


def passing(rules: Iterable[Rule], setting: Setting, plans: Plans) -> Mask:
    """[plans]: where no rule is broken."""
    broken = np.zeros(len(plans), dtype=np.bool_)
    for mask in violations(rules, setting, plans).values():
        broken |= mask
    return ~broken


def findings(rules: Iterable[Rule], setting: Setting, plans: Plans) -> list[Finding]:
    """What a single plan breaks, in the registry's order."""
    row = plans.row(0)
    return [
        Finding(rule=rule.id, severity=rule.severity, message=rule.message(setting, row), source=rule.source)
        for rule in rules
        if rule.mask(setting, plans).any()
    ]


def require(rules: Iterable[Rule], setting: Setting, plans: Plans) -> None:
    """Raise Refused for the first refusal that any of the plans breaks."""
    for rule in rules:
        if rule.severity != "refuse":
            continue
        mask = rule.mask(setting, plans)
        if mask.any():
            raise Refused(rule.id, rule.message(setting, plans.row(int(np.argmax(mask)))))
