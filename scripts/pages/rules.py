"""The page of named rules, printed from the registry."""

from __future__ import annotations

from trainledger.rules import RULES

INTRO = """# Rules

Every plan passes these before anything is computed. `refuse`: the engine or the shapes forbid it. `warn`: it runs, but
a planner does not offer it. `advise`: worth knowing. `trainledger plan` counts rejected plans by id.

| id | severity | about | source |
|---|---|---|---|
"""


def render() -> str:
    """The whole page."""
    return INTRO + "\n".join(f"| `{r.id}` | {r.severity} | {r.scope} | {r.source} |" for r in RULES) + "\n"
