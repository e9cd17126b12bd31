"""`check` of a plan: what each rule of the ledger says, on what evidence, and how the answer reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import test_rules
from checklist_pairs import DS, H100, PAIRS, PT, SMALL
from command_line import ROOT, answer, run
from fake_baselines import drawn, rung, spec_of, wrapped
from trainledger.account.ledger import entry
from trainledger.account.memory import device_bytes
from trainledger.checklist import CHECKS
from trainledger.checklist.reported import ALIASES, MESSAGES, SETTINGS, USAGE, WAITS
from trainledger.records.book import opened
from trainledger.records.record import Baseline
from trainledger.records.store import write
from trainledger.rules import RULES, findings
from trainledger.service import check
from trainledger.service.checked import Checked, Finding, judged, stands
from trainledger.service.common import prepared
from trainledger.service.requests import PlanRequest
from trainledger.service.typed import request_from

BY_ID = {one.id: one for one in CHECKS}
REPORTED = Path(__file__).parent / "data" / "reported_rules.tsv"


def recorded(*, zero: int) -> Baseline:
    """A record of GPT-2 on two ranks."""
    return wrapped("a layout", rung(drawn(np.random.default_rng(0), 0, 2), spec=spec_of(zero=zero)))


def checked(flags: dict[str, Any]) -> Checked:
    found = check.run(request_from(check.Request, flags, "a plan"))
    assert isinstance(found, Checked)
    return found


def finding(flags: dict[str, Any], rule: str) -> Finding | None:
    """What one rule says, the others not asked."""
    account = stands(request_from(check.Request, flags, "a plan")).account
    assert account is not None
    return judged(BY_ID[rule], account)


@pytest.mark.parametrize("rule", PAIRS)
def test_a_rule_of_the_ledger_speaks_of_what_it_is_about(rule: str) -> None:
    pair = PAIRS[rule]
    found = finding(pair.bad, rule)
    assert found is not None
    assert found.severity == pair.severity
    for word in pair.words:
        assert word in f"{found.message}; {found.knob}"
    assert found.evidence
    assert found.knob
    assert finding(pair.good, rule) is None


def test_every_rule_of_the_ledger_has_a_pair_and_an_id_of_its_own() -> None:
    ids = [one.id for one in CHECKS]
    assert set(PAIRS) | {"baseline-missing"} == set(ids)
    assert len({*ids, *(rule.id for rule in RULES)}) == len(ids) + len(RULES)


def test_every_rule_of_the_ledger_is_explained_and_listed() -> None:
    page = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
    listed = {one["name"]: one["scope"] for one in answer("list", "rules")["items"]}
    for one in CHECKS:
        assert f"| `{one.id}` | {one.severity} |" in page
        assert listed[one.id] == "ledger"


def test_every_name_under_which_users_report_is_a_rule_or_says_what_it_waits_for() -> None:
    names = [line.split("\t")[0] for line in REPORTED.read_text(encoding="utf-8").splitlines()[1:]]
    rules = {rule.id for rule in RULES} | {one.id for one in CHECKS}
    assert not set(SETTINGS) & rules
    rules |= set(SETTINGS)
    homes: list[set[str]] = [rules, set(ALIASES), set(USAGE), set(WAITS), set(MESSAGES)]
    for name in names:
        assert sum(name in home for home in homes) == 1, name
    assert set(ALIASES.values()) <= rules
    assert set().union(*homes[1:]) <= set(names)


def test_evidence_is_what_the_ledger_says() -> None:
    flags = {**SMALL, **DS, "gpu": "v100-16gb", "precision": "fp16", "gpus": 8, "zero": 2}
    _, plans, inventory = prepared(request_from(PlanRequest, flags, "a plan"))
    lines = {line.id: line.amount for line in entry(inventory, plans).lines}
    shown = [one for found in checked(flags).findings for one in found.evidence if one.line in lines]
    assert len(shown) >= 2
    for one in shown:
        assert one.amount == lines[one.line], one.line


def test_what_a_lower_stage_would_hold_is_what_its_own_ledger_says() -> None:
    flags = {**SMALL, **PT, **H100}
    found = finding({**flags, "zero": 3}, "zero3-when-tight")
    assert found is not None
    _, plans, inventory = prepared(request_from(PlanRequest, {**flags, "zero": 2}, "a plan"))
    assert found.evidence[0].line == "device at zero_stage 2"
    assert found.evidence[0].amount == device_bytes(inventory, plans)


def test_every_rule_has_a_sentence_that_ends_with_its_knob() -> None:
    for rule in RULES:
        case = test_rules.CASES.get(rule.id)
        if case is not None:
            (found,) = findings([rule], *test_rules.situation(case.model, case.bad))
            assert any(mark in found.message for mark in ("; ", ": ")), found.message


def test_a_refusal_ends_with_5_and_the_ledger_is_not_asked() -> None:
    found = answer("check", "--model", "llama-3-8b", "--gpus", "36", "--tp", "3", "--cp", "3", "--seq", "100", code=5)
    ids = [one["id"] for one in found["findings"]]
    assert ids[:3] == ["heads-divisible-by-tp", "width-divisible-by-tp", "cp-seq"]
    assert (found["ledger"], found["budget"]) == (False, None)
    assert found["findings"][0]["evidence"][0] == {"line": "tp", "amount": 3, "unit": "", "note": "of the plan"}
    assert found["findings"][0]["knob"].startswith("use one of 1, 2, 4, 8")
    text = run("check", "--model", "llama-3-8b", "--gpus", "36", "--tp", "3", "--cp", "3", "--seq", "100")
    assert text.code == 5
    assert text.out.startswith("refused: 3 refusals")


def test_a_word_that_no_engine_has_is_a_finding() -> None:
    found = answer("check", "--model", "llama-3-8b", "--precision", "fp9", code=5)
    assert [one["id"] for one in found["findings"]] == ["engine-precision"]
    assert found["plan"] is None
    assert run("check", "--model", "llama-3-8b", "--precision", "fp9").out.startswith("refused: 1 refusal")


def test_a_fact_that_no_source_states_is_not_asked_of_what_is_refused_anyway() -> None:
    """No source says whether a V100 has FP8; its compute capability is too low whatever one would say."""
    plan = ("--model", "llama-3-8b", "--engine", "megatron", "--precision", "fp8-delayed", "--gpu")
    found = answer("check", *plan, "v100-16gb", code=5)
    assert [one["id"] for one in found["findings"] if one["severity"] == "refuse"] == ["fp8-sm"]
    assert found["plan"]["precision"] == "fp8-delayed"


def test_a_plan_that_passes_ends_with_0_and_shows_evidence_and_knob() -> None:
    done = run("check", str(ROOT / "examples" / "qwen2.5-32b-16xh100.toml"), "--book", "nowhere.db")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].startswith("passes: ")
    at = lines.index(
        "advise: [baseline-missing] there is no run book nowhere.db: nothing says what this layout did before"
    )
    assert lines[at + 1] == "  evidence: baselines of this layout none"
    assert lines[at + 2].startswith("  knob: ")


def test_a_budget_is_what_the_run_takes_at_least() -> None:
    """8 GPUs at their peak: 1e9 tokens in steps of 8 x 1024, each as long as the busiest rank's arithmetic."""
    flags = {**SMALL, **PT, **H100, "zero": 2, "gbs": 8, "token-budget": 1e9, "usd-per-gpu-hour": 2.0}
    found = checked(flags).budget
    assert found is not None
    assert (found.tokens_per_step, found.steps) == (8192, 122071)
    assert found.step_s_at_peak is not None
    assert found.gpu_hours_at_peak == pytest.approx(122071 * found.step_s_at_peak * 8 / 3600)
    assert found.usd_at_peak == pytest.approx(2 * (found.gpu_hours_at_peak or 0))
    assert found.step_s_at_peak > 6 * 1.3e9 * 1024 / 989.4e12


def test_a_config_is_checked_as_what_is_trained(tmp_path: Path) -> None:
    config = tmp_path / "train.toml"
    config.write_text(
        'model = "gpt2"\ngbs = 4\nseq = 256\nattention = "eager"\n[data]\ntext = ["a.txt"]\n[run]\nsteps = 100\n',
        encoding="utf-8",
    )
    found = answer("check", str(config), code=5)
    assert [one["id"] for one in found["findings"] if one["severity"] == "refuse"] == ["runtime-attention"]
    assert (found["plan"]["engine"], found["plan"]["precision"]) == ("pytorch", "fp32")
    config.write_text(config.read_text(encoding="utf-8").replace('attention = "eager"\n', ""), encoding="utf-8")
    assert answer("check", str(config))["budget"]["tokens"] == 100 * 4 * 256


def test_a_key_that_no_config_has_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "train.toml"
    config.write_text('model = "gpt2"\n[run]\nstep = 100\n', encoding="utf-8")
    done = run("check", str(config))
    assert (done.code, done.out) == (1, "")
    assert "steps" in done.err


def test_a_baseline_of_the_layout_is_found_in_the_book(tmp_path: Path) -> None:
    book = tmp_path / "book.db"
    plan = ("--model", "gpt2", "--engine", "pytorch", "--gpus", "2", "--zero", "2", "--book", str(book))

    def said() -> list[str]:
        """What is said of the run book."""
        return [one["message"] for one in answer("check", *plan)["findings"] if one["id"] == "baseline-missing"]

    assert said() == [f"there is no run book {book}: nothing says what this layout did before"]
    with opened(book, create=True) as db:
        write(db, recorded(zero=1))
    assert said() == [f"the run book {book} holds no baseline of this layout"]
    with opened(book, create=True) as db:
        write(db, recorded(zero=2))
    assert said() == []


def test_flags_lie_over_the_file() -> None:
    path = str(ROOT / "examples" / "qwen2.5-32b-16xh100.toml")
    found = answer("check", path, "--tp", "3", "--gpus", "18", code=5)
    assert found["plan"]["tp"] == 3


@pytest.mark.parametrize(
    ("code", "arguments", "holds"),
    [
        (2, (), ("PLAN.toml", "MESSAGE")),
        (1, ("nowhere.toml",), ("nowhere.toml", "no such file")),
        (2, ("examples/qwen2.5-32b-16xh100.toml", "--tensor", "logits"), ("--tensor", "MESSAGE")),
        (2, ("examples/qwen2.5-32b-16xh100.toml", "--model", "examples/llama-3-70b-64xh100.toml"), ("two PLAN files",)),
        (1, ("--model", "gpt2", "--learning-rate", "0"), ("--learning-rate", "above 0")),
    ],
)
def test_what_cannot_be_checked_is_refused(
    code: int, arguments: tuple[str, ...], holds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    done = run("check", *arguments)
    assert (done.code, done.out) == (code, ""), done
    for text in holds:
        assert text in done.err


def test_the_keys_of_the_answer_are_frozen() -> None:
    """A later version may add keys, and takes none away."""
    found = answer("check", "--model", "gpt2", "--gpu", "h100")
    assert list(found) == [
        "model", "cluster", "accelerator", "profile", "plan", "settings", "findings", "ledger", "asked", "budget",
        "usable_bytes", "assumed", "notes",
    ]  # fmt: skip
    assert list(found["findings"][0]) == ["id", "severity", "message", "knob", "evidence", "source"]
    assert list(found["findings"][0]["evidence"][0]) == ["line", "amount", "unit", "note"]
