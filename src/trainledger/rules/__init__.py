"""Every rule, in the order in which a plan meets them."""

from __future__ import annotations

from trainledger.rules import activation, advice, dry, engine, layout, particular, pipeline, runtime, shape
from trainledger.rules.rule import Finding, Rule, findings, passing, require, violations

__all__ = ["PLANNER", "REFUSALS", "RULES", "RUNTIME", "Finding", "Rule", "findings", "passing", "require", "violations"]

RULES: tuple[Rule, ...] = (
    *engine.RULES,
    *activation.RULES,
    *shape.RULES,
    *pipeline.RULES,
    *layout.RULES,
    *particular.RULES,
    *advice.RULES,
    *runtime.RULES,
    *dry.RULES,
)
RUNTIME: tuple[Rule, ...] = tuple(rule for rule in RULES if rule.scope == "runtime")
"""What `prove` asks before it runs a plan, on top of the refusals."""
REFUSALS: tuple[Rule, ...] = tuple(rule for rule in RULES if rule.severity == "refuse" and rule.scope != "runtime")
"""What stops a plan in every verb."""
PLANNER: tuple[Rule, ...] = tuple(
    rule for rule in RULES if rule.severity != "advise" and not rule.offered and rule.scope != "runtime"
)
"""What a search rejects: refusals, and layouts that run but that nobody should be offered."""
