"""Every rule, in the order in which a plan meets them."""

from __future__ import annotations

from trainledger.rules import advice, engine, layout, particular, shape
from trainledger.rules.rule import Finding, Rule, findings, passing, require, violations

__all__ = ["PLANNER", "REFUSALS", "RULES", "Finding", "Rule", "findings", "passing", "require", "violations"]

RULES: tuple[Rule, ...] = (*engine.RULES, *shape.RULES, *layout.RULES, *particular.RULES, *advice.RULES)
REFUSALS: tuple[Rule, ...] = tuple(rule for rule in RULES if rule.severity == "refuse")
PLANNER: tuple[Rule, ...] = tuple(rule for rule in RULES if rule.severity != "advise" and not rule.offered)
"""What a search rejects: refusals, and layouts that run but that nobody should be offered."""
