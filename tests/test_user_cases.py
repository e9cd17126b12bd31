"""What users measured or were refused, against the account: 47 public threads, each with the figures that it states.

Amounts come from a thread's own arithmetic on its parameter count; the account counts each padded tensor, so they
agree to a fraction of a percent, and `within` says to which. The rest is what fits, what is refused, and what is noted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trainledger.account.states import state_account
from trainledger.errors import Refused
from trainledger.facts.by_hand import model_from_count
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Scenario, make_plans
from trainledger.plans.setting import make_setting
from trainledger.service import ledger, states
from trainledger.service.requests import PlanRequest

FILE = Path(__file__).parent / "data" / "user_cases.json"
CASES: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))["cases"]
UNITS = {"GB": 10**9, "GiB": 2**30, "MiB": 2**20}
CHECKS = ("amounts", "fits", "held", "moved", "notes", "refused")


def asks(check: str) -> list[Any]:
    """Every question that has this check, named after its thread."""
    return [
        pytest.param(ask, id=f"{case['source']}-{number}")
        for case in CASES
        for number, ask in enumerate(case["asks"])
        if check in ask
    ]


def answer(ask: dict[str, Any]) -> states.Response:
    return states.run(msgspec.convert(ask["flags"], states.Request))


def account(ask: dict[str, Any]) -> ledger.Response:
    return ledger.account(msgspec.convert(ask["flags"], PlanRequest))


def reply(ask: dict[str, Any]) -> ledger.Response | states.Response:
    """Of one plan where a zero_stage is asked for, else of all of them."""
    return account(ask) if "zero" in ask["flags"] else answer(ask)


def test_every_question_is_checked() -> None:
    assert len({case["source"] for case in CASES}) == len(CASES) == 47
    for case in CASES:
        assert case["url"].startswith("https://")
        assert case["reported"]
        for ask in case["asks"]:
            assert set(ask) - {"flags"} <= set(CHECKS)
            assert set(ask) & set(CHECKS)


@pytest.mark.parametrize("ask", asks("amounts"))
def test_states_are_what_the_report_works_out(ask: dict[str, Any]) -> None:
    rows = {row.zero_stage: row for row in answer(ask).rows}
    for amount in ask["amounts"]:
        row = rows[amount["zero"]]
        held = sum(getattr(row, f"{state}_bytes") for state in amount["of"])
        assert held / UNITS[amount["unit"]] == pytest.approx(amount["value"], rel=amount["within"])


@pytest.mark.parametrize("ask", asks("fits"))
def test_what_ran_fits_and_what_ran_out_does_not(ask: dict[str, Any]) -> None:
    rows = {row.zero_stage: row for row in answer(ask).rows}
    assert {zero: rows[int(zero)].fits for zero in ask["fits"]} == ask["fits"]


@pytest.mark.parametrize("ask", asks("held"))
def test_a_failed_allocation_is_a_line(ask: dict[str, Any]) -> None:
    amounts = {line.id: line.amount for line in account(ask).lines}
    for line in ask["held"]:
        assert amounts[line["line"]] / UNITS[line["unit"]] == pytest.approx(line["value"], rel=line["within"])


@pytest.mark.parametrize("ask", asks("moved"))
def test_a_rank_sends_what_the_report_works_out(ask: dict[str, Any]) -> None:
    traffic = account(ask).traffic
    for move in ask["moved"]:
        sent = sum(t.wire_bytes for t in traffic if move["collective"] in ("", t.collective))
        assert sent / UNITS[move["unit"]] == pytest.approx(move["value"], rel=move["within"])


@pytest.mark.parametrize("ask", asks("refused"))
def test_what_engines_refuse_is_refused_by_name(ask: dict[str, Any]) -> None:
    with pytest.raises(Refused, match=rf"^\[{ask['refused']}\]"):
        reply(ask)


@pytest.mark.parametrize("ask", asks("notes"))
def test_what_a_user_should_know_is_said(ask: dict[str, Any]) -> None:
    """And a plan that engines accept, with nothing to be said, is not refused."""
    assert set(ask["notes"]) <= {note.rule for note in reply(ask).notes}


@pytest.mark.parametrize(
    ("params", "largest", "gpus", "offload", "printed_gib"),
    [
        # deepspeedai/DeepSpeed#4527: 29.01 and, all offloaded, 0.49 GB on 4 GPUs
        (6_805_000_000, 131_000_000, 4, (), 29.0074),
        (6_805_000_000, 131_000_000, 4, ("optimizer", "parameters"), 0.488013),
        # deepspeedai/DeepSpeed#2797: 48.02 GB for one GPU, where the run had 4
        (2_849_000_000, 65_000_000, 1, (), 48.0022),
        (2_849_000_000, 65_000_000, 4, (), 12.1822),
    ],
)
def test_deepspeeds_estimator_prints_this(
    params: int, largest: int, gpus: int, offload: tuple[str, ...], printed_gib: float
) -> None:
    setting = make_setting(
        model_from_count(params),
        Workload(),
        Scenario(engine="deepspeed-estimator", offload=offload),
        largest_module_params=largest,
    )
    plans = make_plans({"dp_shard": gpus, "zero_stage": 3})
    held = int(state_account(Inventory(setting), plans).at("rest").max())
    assert held / 2**30 == pytest.approx(printed_gib, rel=1e-4)


def test_device_memory_does_not_fall_with_gpus_where_states_are_in_host_memory() -> None:
    """hpcaitech/ColossalAI#3172, hiyouga/LLaMA-Factory#4141: more GPUs do not help what offloading already took."""
    held = [
        states.run(
            states.Request(model="qwen2.5-72b", gpus=n, engine="deepspeed", offload=("optimizer", "parameters"))
        ).rows[3]
        for n in (64, 128, 256)
    ]
    assert len({row.total_bytes for row in held}) == 1
    host = [row.host_bytes or 0 for row in held]
    assert host[1] > 0
    assert host[0] == pytest.approx(2 * host[1], rel=1e-3)
    assert host[1] == pytest.approx(2 * host[2], rel=1e-3)
