"""`check` of a plan as text: the verdict, then each finding with its evidence and its knob."""

from __future__ import annotations

from trainledger.report.document import BLANK, Document, Style, Text, left, table
from trainledger.report.words import Answer, notes, on_card, whole
from trainledger.units import format_bytes

STYLES: dict[str, Style] = {"refuse": "bad", "warn": "warn", "advise": ""}
COUNTED = {"refuse": "refusal", "warn": "warning", "advise": "hint"}


def document(answer: Answer) -> Document:
    """The verdict, the plan, the findings, gravest first, and the budget."""
    found: Document = [_verdict(answer), *on_card(answer), *_settings(answer)]
    for finding in answer["findings"]:
        found += [BLANK, *_finding(finding)]
    if not answer["ledger"]:
        found += [BLANK, Text("the rules that need a ledger were not asked: a plan that is refused has none", "dim")]
    if answer["budget"] is not None:
        found += [BLANK, *_budget(answer["budget"])]
    return [*found, *notes(answer)]


def _settings(answer: Answer) -> Document:
    """Which keys of a file of settings made the plan, and which change nothing."""
    read = answer["settings"]
    if read is None:
        return []
    used = [[one["key"], one["value"], one["flag"]] for one in read["used"]]
    unused = [[one["key"], one["value"], one["why"]] for one in read["unused"]]
    found: Document = []
    if used:
        found += [BLANK, table([left(f"used of {read['path']} ({read['kind']})"), left("value"), left("as")], used)]
    if unused:
        found += [BLANK, table([left("not used"), left("value"), left("because it")], unused)]
    return found


def _verdict(answer: Answer) -> Text:
    counts = {severity: sum(one["severity"] == severity for one in answer["findings"]) for severity in COUNTED}
    said = ", ".join(
        f"{count} {COUNTED[severity]}{'s' if count != 1 else ''}" for severity, count in counts.items() if count
    )
    verdict = "refused" if counts["refuse"] else "passes"
    return Text(f"{verdict}: {said or 'nothing stands against it'}, of {answer['asked']} rules", "answer")


def _finding(finding: Answer) -> Document:
    found: Document = [
        Text(f"{finding['severity']}: [{finding['id']}] {finding['message']}", STYLES[finding["severity"]])
    ]
    if finding["evidence"]:
        found.append(Text(f"  evidence: {', '.join(map(_evidence, finding['evidence']))}", "dim"))
    if finding["knob"]:
        found.append(Text(f"  knob: {finding['knob']}"))
    return found


def _evidence(one: Answer) -> str:
    amount, unit = one["amount"], one["unit"]
    if amount is None:
        return f"{one['line']} none"
    if unit == "B":
        shown = f"{amount / 1e9:.3g} GB" if one["line"].startswith("moved/") else format_bytes(int(amount))
    elif isinstance(amount, int):
        shown = f"{whole(amount)} {unit}".rstrip()
    else:
        shown = f"{amount:.3g} {unit}".rstrip()
    return f"{one['line']} {shown}"


def _budget(budget: Answer) -> Document:
    """What the run takes at least."""
    parts = [f"{whole(budget['tokens_per_step'])} tokens a step"]
    if budget["steps"] is not None:
        parts.append(f"{whole(budget['steps'])} steps")
    if budget["step_s_at_peak"] is not None:
        parts.append(f"at least {budget['step_s_at_peak']:.3g} s a step (arithmetic at the card's peak)")
    if budget["gpu_hours_at_peak"] is not None:
        parts.append(f"at least {budget['gpu_hours_at_peak']:,.0f} GPU hours")
    if budget["usd_at_peak"] is not None:
        parts.append(f"at least {budget['usd_at_peak']:,.0f} USD")
    return [Text(f"budget: {', '.join(parts)}")]
