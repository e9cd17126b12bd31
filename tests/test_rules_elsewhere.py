"""Every id that a refusal bears is in a registry, wherever in the package it is raised."""

from __future__ import annotations

import ast
from pathlib import Path

import trainledger
from trainledger.rules import ELSEWHERE, RULES

IDS = {rule.id for rule in RULES}
BESIDE = {one.id for one in ELSEWHERE}


def raised() -> set[tuple[str, str]]:
    """(id, module) of every id that is written where Refused is made."""
    source = Path(trainledger.__file__).parent
    return {
        (call.args[0].value, path.relative_to(source).as_posix())
        for path in source.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Refused"
        if isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
    }


def test_whatever_is_refused_by_name_is_registered() -> None:
    assert {rule for rule, _ in raised()} <= IDS | BESIDE


def test_what_no_plan_decides_is_said_where_the_registry_says() -> None:
    assert {(one.id, one.source) for one in ELSEWHERE} <= raised()
    assert len(BESIDE) == len(ELSEWHERE)
    assert not BESIDE & IDS
