"""The page of named rules, printed from the registry."""

from __future__ import annotations

from trainledger.rules import RULES, Rule

INTRO = """# Rules

Every plan passes these before anything is computed. `refuse`: the engine or the shapes forbid it. `warn`: it runs, but
a planner does not offer it. `advise`: worth knowing. `trainledger plan` counts rejected plans by id. "About" is the
model's shapes, the plan, what an engine can do, or the engines that a rule speaks of. Those about the `runtime` bind
`trainledger prove` alone: they say what this package's own program runs, not what PyTorch could.

| id | severity | about | source |
|---|---|---|---|
"""


def render() -> str:
    """The whole page."""
    return INTRO + "\n".join(f"| `{r.id}` | {r.severity} | {_about(r)} | {r.source} |" for r in RULES) + "\n"


def _about(rule: Rule) -> str:
    return ", ".join(rule.engines) or rule.scope
