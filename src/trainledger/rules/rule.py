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
Scope = Literal["model", "plan", "engine"]


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One rule.

    broken     (setting, plans) -> mask, True where broken
    sentence   (setting, one plan as integers) -> value, rule and knob, for a person
    """

    id: str
    severity: Severity
    scope: Scope
    source: str
    broken: Callable[[Setting, Plans], Mask]
    sentence: Callable[[Setting, dict[str, int]], str]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that one plan breaks."""

    rule: str
    severity: Severity
    message: str
    source: str


def violations(rules: Iterable[Rule], setting: Setting, plans: Plans) -> dict[str, Mask]:
    """Masks of broken rules by id, rules that no plan breaks left out."""
    masks = {rule.id: _as_mask(rule.broken(setting, plans), len(plans)) for rule in rules}
    return {rule: mask for rule, mask in masks.items() if mask.any()}


def findings(rules: Iterable[Rule], setting: Setting, plans: Plans) -> list[Finding]:
    """What a single plan breaks, in the registry's order."""
    row = plans.row(0)
    return [
        Finding(rule=rule.id, severity=rule.severity, message=rule.sentence(setting, row), source=rule.source)
        for rule in rules
        if _as_mask(rule.broken(setting, plans), 1).any()
    ]


def require(rules: Iterable[Rule], setting: Setting, plans: Plans) -> None:
    """Raise Refused for the first refusal that any of the plans breaks."""
    for rule in rules:
        if rule.severity != "refuse":
            continue
        mask = _as_mask(rule.broken(setting, plans), len(plans))
        if mask.any():
            raise Refused(rule.id, rule.sentence(setting, plans.row(int(np.argmax(mask)))))


def _as_mask(value: Mask | bool | np.bool_, length: int) -> Mask:
    return np.broadcast_to(np.asarray(value, dtype=np.bool_), (length,))
