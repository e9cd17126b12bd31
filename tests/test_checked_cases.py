"""Reports of users as plans, and the findings that `check` owes each: see tests/data/checked_cases.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from command_line import ROOT
from test_cases import FOLDER, cases
from trainledger.checklist import CHECKS
from trainledger.facts.load import load_toml
from trainledger.service import check
from trainledger.service.checked import Checked, Finding, judged, stands
from trainledger.service.typed import request_from

FILE = Path(__file__).parent / "data" / "checked_cases.toml"


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One report: a plan, or a run of tests/cases, and ids that must and must not be found."""

    id: str
    url: str
    reported: str
    open: str = ""
    plan: dict[str, Any] = {}
    of: str = ""
    finds: tuple[str, ...] = ()
    clear: tuple[str, ...] = ()


CASES = msgspec.convert(load_toml(FILE)["case"], list[Case])


def plan_of(case: Case) -> dict[str, Any]:
    if not case.of:
        return case.plan
    file, _, name = case.of.partition(", ")
    return next(run.plan for run in cases()[file].run if run.name == name)


def findings_of(case: Case) -> dict[str, Finding]:
    """What the rules that the case names say, by id; of the ledger those alone are asked."""
    placed = {
        key: str(FOLDER / value) if key in ("gpu", "model") and "/" in str(value) else value
        for key, value in plan_of(case).items()
    }
    stand = stands(request_from(check.Request, placed, case.id))
    found = list(stand.found)
    if stand.account is not None:
        asked = (one for one in CHECKS if one.id in (*case.finds, *case.clear))
        found += [finding for one in asked if (finding := judged(one, stand.account)) is not None]
    return {one.id: one for one in found}


def test_every_case_names_its_thread_and_owes_something() -> None:
    assert len(CASES) >= 50
    for case in CASES:
        assert case.url.startswith("https://")
        assert bool(case.plan) != bool(case.of)
        assert case.finds or case.clear


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.id}-{case.reported[:24]}")
def test_a_report_finds_its_rule(case: Case) -> None:
    found = findings_of(case)
    assert set(case.finds) <= set(found), set(case.finds) - set(found)
    assert not set(case.clear) & set(found)
    for one in case.finds:
        assert found[one].message
        assert found[one].knob


def good_plans() -> list[Path]:
    return [path for path in sorted((ROOT / "examples").glob("*.toml")) if "model" in load_toml(path)]


@pytest.mark.parametrize("path", good_plans(), ids=lambda path: path.stem)
def test_a_good_plan_is_warned_of_nothing(path: Path) -> None:
    """But those that show FP8 on a CPU, on matrices that no GPU multiplies faster in FP8."""
    found = check.run(check.Request(message=str(path)))
    assert isinstance(found, Checked)
    small = ["fp8-small-gemm"] if path.stem.startswith("tiny-zero3-fp8") else []
    assert [one.id for one in found.findings if one.severity != "advise"] == small
    assert found.exit_code == 0
