"""Every rule, in the order in which a plan meets them."""

from __future__ import annotations

from trainledger.rules import activation, advice, checked, dry, engine, layout, particular, pipeline, runtime, shape
from trainledger.rules.elsewhere import ELSEWHERE, Elsewhere
from trainledger.rules.rule import Finding, Rule, findings, passing, require, violations

__all__ = [
    "ELSEWHERE",
    "PLANNER",
    "REFUSALS",
    "RULES",
    "RUNTIME",
    "WORDS",
    "Elsewhere",
    "Finding",
    "Rule",
    "findings",
    "passing",
    "require",
    "violations",
]

WORDS: tuple[Rule, ...] = (*engine.RULES, *activation.RULES)
"""Whether an engine has what a plan names: where it has not, others cannot be asked."""
RULES: tuple[Rule, ...] = (
    *WORDS,
    *shape.RULES,
    *pipeline.RULES,
    *layout.RULES,
    *particular.RULES,
    *advice.RULES,
    *runtime.RULES,
    *dry.RULES,
    *checked.RULES,
)
RUNTIME: tuple[Rule, ...] = tuple(rule for rule in RULES if rule.scope == "runtime")
"""What `prove` asks before it runs a plan, on top of the refusals."""
REFUSALS: tuple[Rule, ...] = tuple(rule for rule in RULES if rule.severity == "refuse" and rule.scope != "runtime")
"""What stops a plan in every verb."""
PLANNER: tuple[Rule, ...] = tuple(
    rule for rule in RULES if rule.severity != "advise" and not rule.offered and rule.scope not in ("runtime", "check")
)
"""What a search rejects: refusals, and layouts that run but that nobody should be offered."""
