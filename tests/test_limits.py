"""How far a plan can be stretched: the answer fits, and one step more does not."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from command_line import answer, run
from trainledger.account.memory import device_bytes
from trainledger.account.memory.answers.limits import REFUSED, SEQ_STEP, largest, limits, most_params
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Plans, make_plans
from trainledger.profiles import engine_names
from trainledger.report.bars import PARTS, WIDTH
from trainledger.service.common import Run, prepared
from trainledger.service.requests import PlanRequest


def prepare(**flags: object) -> tuple[Run, Plans, Inventory]:
    return prepared(msgspec.convert({"model": "llama-3-8b", "gpu": "h100", **flags}, PlanRequest))


@given(st.integers(1, 50), st.integers(0, 10_000), st.integers(1, 100_000), st.integers(1, 5_000), st.integers(0, 3))
def test_the_largest_is_the_last_that_fits(slope: int, base: int, usable: int, start: int, bend: int) -> None:
    most = 4096

    def held(count: int) -> int:
        return base + slope * count + bend * max(count - 300, 0) ** 2

    expected = max((count for count in range(1, most + 1) if held(count) <= usable), default=0)
    assert largest(held, usable, start, most) == expected


def test_a_search_that_a_rule_ends_stops_before_it() -> None:
    calls: list[int] = []

    def held(count: int) -> int:
        calls.append(count)
        return count if count <= 1000 else REFUSED

    assert largest(held, 1 << 40, 8, 1 << 30) == 1000
    assert len(calls) < 25


@pytest.mark.parametrize("engine", ["paper", "pytorch", "megatron"])
def test_one_step_more_does_not_fit(engine: str) -> None:
    ran, plans, inventory = prepare(engine=engine, gpus=8, tp=2, zero=1)
    usable = ran.usable_bytes
    assert usable is not None
    found = limits(inventory, plans)
    assert found.largest_mbs is not None
    assert found.longest_seq is not None
    assert found.largest_mbs > 1
    assert found.longest_seq % SEQ_STEP == 0

    def held(mbs: int, seq: int) -> int:
        workload = msgspec.structs.replace(ran.setting.workload, seq=seq)
        longer = Inventory(dataclasses.replace(ran.setting, workload=workload))
        return device_bytes(longer, make_plans({**plans.row(0), "mbs": mbs}))

    assert held(found.largest_mbs, 4096) <= usable < held(found.largest_mbs + 1, 4096)
    assert held(1, found.longest_seq) <= usable < held(1, found.longest_seq + SEQ_STEP)


def test_a_micro_batch_divides_the_global_batch() -> None:
    _, plans, inventory = prepare(engine="megatron", gpus=8, tp=2, zero=1, gbs=4 * 12)
    found = limits(inventory, plans).largest_mbs
    _, loose, whole = prepare(engine="megatron", gpus=8, tp=2, zero=1)
    free = limits(whole, loose).largest_mbs
    assert found in (1, 2, 3, 4, 6, 12)
    assert free is not None
    assert found == max(size for size in (1, 2, 3, 4, 6, 12) if size <= free)


def test_nothing_fits_is_0_and_a_count_has_no_tokens() -> None:
    _, plans, inventory = prepare(model="llama-3-70b", engine="megatron")
    assert msgspec.structs.astuple(limits(inventory, plans)) == (0, 0)
    _, plans, inventory = prepare(model="7B")
    assert msgspec.structs.astuple(limits(inventory, plans)) == (None, None)


@pytest.mark.parametrize("engine", engine_names())
def test_every_engine_holds_the_states_of_a_parameter_count(engine: str) -> None:
    ran, plans, inventory = prepare(model="7B", gpus=16, engine=engine)
    assert ran.setting.model.params_only
    assert device_bytes(inventory, plans) > 16 * 7e9 / 16


def test_the_most_parameters_are_those_of_the_papers_table() -> None:
    """2 + 2 + 12 bytes a parameter, divided as the ZeRO paper does, and by model-parallel ranks evenly."""
    for zero, each in ((0, 16.0), (1, 4 + 12 / 64), (2, 2 + 14 / 64), (3, 16 / 64)):
        ran, plans, _ = prepare(model="1", gpus=64, zero=zero)
        assert ran.usable_bytes is not None
        assert most_params(ran.setting, plans, ran.usable_bytes) == pytest.approx(ran.usable_bytes / each, rel=1e-9)
        cut = make_plans({**plans.row(0), "tp": 4, "pp": 2})
        whole = most_params(ran.setting, plans, ran.usable_bytes)
        assert most_params(ran.setting, cut, ran.usable_bytes) == 8 * whole


def test_a_ledger_on_a_card_tells_its_limits_and_one_without_does_not() -> None:
    arguments = ("ledger", "llama-3-8b", "--gpus", "8", "--zero", "3", "--engine", "pytorch")
    memory = answer(*arguments, "--gpu", "h100")["memory"]
    assert memory["largest_mbs"] > 1
    assert memory["longest_seq"] > 4096
    text = run(*arguments, "--gpu", "h100").out
    assert (
        f"largest that fits, all else as it is: --mbs {memory['largest_mbs']}, or --seq {memory['longest_seq']}\n"
        in text
    )
    memory = answer(*arguments)["memory"]
    assert memory["largest_mbs"] is memory["longest_seq"] is None
    assert "largest that fits" not in run(*arguments).out


@pytest.mark.parametrize(("gpu", "code"), [("h100", 0), ("v100-16gb", 3)])
def test_every_stage_has_a_bar_whose_parts_sum_to_the_meter(gpu: str, code: int) -> None:
    arguments = ("ledger", "llama-3-70b", "--gpus", "64", "--tp", "8", "--pp", "4", "--zero", "1", "--gbs", "64")
    arguments = (*arguments, "--engine", "megatron", "--gpu", gpu, "--precision", "fp16", "--recompute", "none")
    found = answer(*arguments, code=code)
    memory = found["memory"]
    held = [sum(stage[part] for part in PARTS) for stage in memory["stages"]]
    assert max(held) == memory["meters"]["device"]["estimate"]
    assert [stage["free"] for stage in memory["stages"]] == [memory["usable_bytes"] - one for one in held]
    text = run(*arguments).out
    drawn = [line.split("[")[1].split("]")[0] for line in text.splitlines() if "[w" in line]
    assert len(drawn) == len(held) > 1
    assert {len(bar) for bar in drawn} == {WIDTH}
    assert any("!" in bar for bar in drawn) == (code == 3)
    for bar, one in zip(drawn, held, strict=True):
        scale = max(*held, memory["usable_bytes"])
        assert WIDTH - bar.count(".") == pytest.approx(WIDTH * one / scale, abs=1)


def test_the_largest_model_is_a_question_without_a_model() -> None:
    """ZeRO paper, table 2: 7.6 B at stage 1 on 64 GPUs, twice that with model parallelism of 2, of 32 GB each."""
    arguments = ("ledger", "--fit-params", "--gpu", "v100-32gb", "--precision", "fp16", "--zero", "1")
    alone = answer(*arguments, "--gpus", "64")
    assert alone["fit_params"] == pytest.approx(alone["usable_bytes"] / (4 + 12 / 64), rel=1e-9)
    both = answer(*arguments, "--gpus", "128", "--tp", "2")
    assert both["fit_params"] == 2 * alone["fit_params"]
    assert (both["plan"]["tp"], both["plan"]["gpus"], both["plan"]["dp"]) == (2, 128, 64)
    assert run(*arguments, "--gpus", "64").out.startswith("7.86 B parameters at most: their states fit V100")


@pytest.mark.parametrize(
    ("arguments", "holds"),
    [
        (("gpt2", "--gpu", "h100"), "leave MODEL out"),
        (("--hidden", "64", "--gpu", "h100"), "leave --hidden out"),
        (("--sweep", "mbs=1,2", "--gpu", "h100"), "leave --sweep out"),
        ((), "add --gpu"),
        (("--gpu", "h100", "--gpus", "12", "--tp", "8"), "not a multiple of tp x pp x cp"),
    ],
)
def test_what_the_largest_model_cannot_be_asked_with(arguments: tuple[str, ...], holds: str) -> None:
    done = run("ledger", "--fit-params", *arguments)
    assert (done.code, done.out) == (2, "")
    assert holds in done.err
