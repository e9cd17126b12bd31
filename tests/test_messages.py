"""Every message that a case of bad input or a broken rule brings, to the letter: text is an interface too."""

from __future__ import annotations

import pytest

import test_cli_errors
import test_rules
from command_line import ROOT, check_golden, run
from trainledger.rules import RULES, findings


def said_by_rules() -> list[str]:
    lines: list[str] = []
    for rule in RULES:
        case = test_rules.CASES[rule.id]
        (found,) = findings([rule], *test_rules.situation(case.model, case.bad))
        lines.append(f"[{found.rule}] {found.message}")
    return lines


def test_the_messages_are_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed word is a visible edit of the golden file; a new case adds its line."""
    monkeypatch.chdir(ROOT)
    typed = [run(*arguments).err for _, arguments, _ in test_cli_errors.CASES.values()]
    check_golden("messages.txt", "".join(sorted({*typed, *(f"{line}\n" for line in said_by_rules())})))
