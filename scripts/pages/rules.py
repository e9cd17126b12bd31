"""The page of named rules, printed from the registries."""

from __future__ import annotations

from trainledger.checklist import CHECKS, Check
from trainledger.checklist.reported import ALIASES, MESSAGES, SETTINGS, USAGE, WAITS
from trainledger.rules import ELSEWHERE, RULES, Rule

INTRO = """# Rules

Every plan passes these before anything is computed. `refuse`: the engine or the shapes forbid it. `warn`: it runs, but
a planner does not offer it. `advise`: worth knowing. `trainledger plan` counts rejected plans by id. "About" is the
model's shapes, the plan, what an engine can do, or the engines that a rule speaks of. Those about the `runtime` bind
`trainledger prove` alone: they say what this package's own program runs, not what PyTorch could. Those of `check` are
said by that verb and no other.

| id | severity | about | source |
|---|---|---|---|
"""

LEDGER = """
## Of the ledger

`trainledger check` asks these too, once no rule above refuses the plan. Each finding has the lines that it rests on,
with their amounts, and the knob to turn; the severity is the gravest that a rule can have.

| id | severity | about | source |
|---|---|---|---|
"""

BESIDE = """
## Of what is run

These refuse a run before it trains, and no plan alone decides them: a config, the files of tokens, or the machine does.

| id | about | refuses | source |
|---|---|---|---|
"""

REPORTED = """
## What users report

Reports of users were sorted under names; these are other spellings, or what a report recommends, and the rule that says
it or whose knob it is. A name that is a rule's own id is not repeated.

| name | rule |
|---|---|
"""

UNSAYABLE = """
These no plan can say wrong, for there is one flag for it:

| name | why |
|---|---|
"""

OF_MESSAGES = """
These are said of an out-of-memory message:

| name | when |
|---|---|
"""

OF_SETTINGS = """
These are said of a file of an engine's or a launcher's own settings, beside the rules of the plan that it makes:

| name | when |
|---|---|
"""

WAITING = """
These cannot be judged from a plan:

| name | needs | why |
|---|---|---|
"""


def render() -> str:
    """The whole page."""
    sections = (
        (INTRO, [f"| `{r.id}` | {r.severity} | {_about(r)} | {r.source} |" for r in RULES]),
        (LEDGER, [f"| `{c.id}` | {c.severity} | {_engines(c)} | {c.source} |" for c in CHECKS]),
        (BESIDE, [f"| `{e.id}` | {e.about} | {e.refuses} | trainledger {e.source} |" for e in ELSEWHERE]),
        (REPORTED, [f"| {name} | `{rule}` |" for name, rule in sorted(ALIASES.items())]),
        (UNSAYABLE, [f"| {name} | {why} |" for name, why in sorted(USAGE.items())]),
        (OF_MESSAGES, [f"| {name} | {when} |" for name, when in sorted(MESSAGES.items())]),
        (OF_SETTINGS, [f"| `{name}` | {when} |" for name, when in sorted(SETTINGS.items())]),
        (WAITING, [f"| {name} | {waits.needs} | {waits.why} |" for name, waits in sorted(WAITS.items())]),
    )
    return "".join("\n".join((heading.rstrip("\n"), *rows, "")) for heading, rows in sections)


def _about(rule: Rule) -> str:
    return ", ".join(rule.engines) or rule.scope


def _engines(check: Check) -> str:
    return ", ".join(check.engines) or "ledger"
