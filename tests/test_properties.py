"""What must hold of every model and plan: one code path for one plan and many, exact units, no overflow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strategies import (
    ENGINES,
    as_plans,
    columns,
    dense,
    held,
    legal,
    llama,
    plan_of,
    routed,
    setting_of,
    small_models,
    state_rows,
)
from trainledger import dtypes
from trainledger.account.ledger import entry
from trainledger.account.memory import stage_memory
from trainledger.account.peak import peak_of
from trainledger.account.shares import shares
from trainledger.account.states import account_of, state_account
from trainledger.account.traffic import all_traffic, wire_totals
from trainledger.account.traffic.data import data_traffic
from trainledger.account.traffic.model import model_traffic
from trainledger.errors import BadInput
from trainledger.facts.by_hand import model_by_hand, model_from_count
from trainledger.facts.model import Model
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import DEGREE_LIMIT, Plans
from trainledger.plans.setting import Setting
from trainledger.profiles.profile import CATEGORIES, INSTANTS

QUICK = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def settings_of(model: Model, interleaved: bool, recompute: str) -> Iterator[Setting]:
    schedule = "interleaved" if interleaved else "1f1b"
    for engine in ENGINES:
        yield setting_of(model, engine=engine, schedule=schedule, recompute=recompute)


CASE = {
    "model": small_models(),
    "rows": st.lists(columns(), min_size=1, max_size=6),
    "interleaved": st.booleans(),
    "recompute": st.sampled_from(("full", "none")),
}


@QUICK
@given(**CASE)
def test_many_plans_are_many_single_plans(
    model: Model, rows: list[dict[str, int]], interleaved: bool, recompute: str
) -> None:
    for setting in settings_of(model, interleaved, recompute):
        chosen = legal(setting, rows)
        if not chosen:
            continue
        together = state_rows(setting, as_plans(chosen))
        apart = [state_rows(setting, as_plans([row]))[0] for row in chosen]
        assert together == apart


def wire(setting: Setting, plans: Plans) -> list[list[tuple[int, float, float]]]:
    """Per plan the (pp_stage, data-parallel, model-parallel) bytes on the wire of each distinct stage that sends."""
    stage, data, model = wire_totals(Inventory(setting), plans)
    return [
        [(int(s), float(d), float(m)) for s, d, m in zip(stage[i], data[i], model[i], strict=True) if d or m]
        for i in range(len(plans))
    ]


@QUICK
@given(**CASE)
def test_traffic_of_many_plans_is_that_of_single_plans(
    model: Model, rows: list[dict[str, int]], interleaved: bool, recompute: str
) -> None:
    for setting in settings_of(model, interleaved, recompute):
        chosen = legal(setting, rows)
        if chosen:
            assert wire(setting, as_plans(chosen)) == [wire(setting, as_plans([row]))[0] for row in chosen]


@QUICK
@given(**CASE)
def test_factorised_is_row_by_row_to_the_last_bit(
    model: Model, rows: list[dict[str, int]], interleaved: bool, recompute: str
) -> None:
    """States and wire totals on distinct combinations, gathered, against every plan worked out in full."""
    for setting in settings_of(model, interleaved, recompute):
        chosen = legal(setting, rows)
        if not chosen:
            continue
        plans, inventory = as_plans(chosen), Inventory(setting)
        own = shares(inventory, plans)
        plain = account_of(inventory, own, np.arange(len(plans)))
        factorised = state_account(inventory, plans)
        for category in CATEGORIES:
            for instant in INSTANTS:
                gathered = factorised.held[category, instant][factorised.index]
                assert (gathered == plain.held[category, instant]).all()
        _, *totals = wire_totals(inventory, plans)
        for total, part in zip(totals, (data_traffic, model_traffic), strict=True):
            row_by_row = np.zeros_like(total)
            for call in part(inventory, own):
                row_by_row += call.wire_bytes()
            assert (total == row_by_row).all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("pp", [1, 2])
def test_totals_on_the_wire_are_the_sum_of_the_collectives(engine: str, pp: int) -> None:
    """Every zero_stage with one micro-batch and with several: the totals leave out columns that do not matter."""
    setting = setting_of(dense(), engine=engine)
    for zero_stage in setting.profile.zero_stages:
        plans = plan_of(pp=pp, dp_shard=4, zero_stage=zero_stage, num_microbatches=[1, 8])
        inventory = Inventory(setting)
        _, data, model = wire_totals(inventory, plans)
        calls = all_traffic(inventory, shares(inventory, plans))
        assert (data + model == sum(call.wire_bytes() for call in calls)).all(), zero_stage


@QUICK
@given(**CASE)
def test_every_collective_is_sane(model: Model, rows: list[dict[str, int]], interleaved: bool, recompute: str) -> None:
    for setting in settings_of(model, interleaved, recompute):
        chosen = legal(setting, rows)
        if not chosen:
            continue
        inventory = Inventory(setting)
        for call in all_traffic(inventory, shares(inventory, as_plans(chosen))):
            alone, ranks = call.ranks == 1, call.ranks[:, None]
            assert (call.count >= 0).all()
            assert (call.in_bytes >= 0).all()
            assert (call.out_bytes >= 0).all()
            assert not call.count[alone].any()
            assert not call.in_bytes[alone].any()
            assert (call.in_bytes[call.count == 0] == 0).all()
            assert (call.wire_bytes() <= 2 * np.maximum(call.in_bytes, call.out_bytes)).all()
            if call.op == "all_gather":
                assert (call.in_bytes == call.out_bytes // ranks).all()
            if call.op == "reduce_scatter":
                assert (call.out_bytes == call.in_bytes // ranks).all()
            if call.op in ("all_reduce", "all_to_all"):
                assert (call.in_bytes == call.out_bytes).all()


@QUICK
@given(model=small_models(), row=columns(), more=st.sampled_from((2, 3, 5)))
def test_states_never_grow_with_the_ranks_that_share_them(model: Model, row: dict[str, int], more: int) -> None:
    """Megatron pads to 128 and to the ranks, DeepSpeed to twice the ranks: they may grow by that multiple alone."""
    for setting in settings_of(model, interleaved=row["vpp"] > 1, recompute="full"):
        wide = [{**few, "dp_shard": few["dp_shard"] * more} for few in legal(setting, [row])]
        for few, many in zip(legal(setting, [row]), legal(setting, wide), strict=False):
            first, second = (state_account(Inventory(setting), as_plans([plan])) for plan in (few, many))
            for key, amount in second.held.items():
                if key[0] == "buffers" and few["zero_stage"] == 0:
                    continue  # nothing is divided, and DDP's buckets come with the second rank
                growth = int(amount.max()) - int(first.held[key].max())
                assert growth <= _padding(setting, many)


def _padding(setting: Setting, row: dict[str, int]) -> int:
    """Bytes by which the largest multiple that a buffer is padded to may exceed the smaller one."""
    ranks = row["dp_shard"] * row["dp_replicate"] * row["cp"] * row["tp"]
    if setting.profile.name == "megatron":
        chunk = 2 * max(101 * 96, 64 * 96 * 20) if row["zero_stage"] > 1 else 2 * 128
        return 18 * ranks * chunk * (setting.model.num_layers + 2)
    return 8 * 2 * 2 * ranks if setting.profile.name == "deepspeed" else 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", [dense(), routed(), llama("70b")], ids=["dense", "routed", "70b"])
def test_a_larger_byte_scales_every_byte_and_nothing_else(
    engine: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte made seven times as large makes every held and moved byte seven times as large; counts stay."""
    setting = setting_of(model, engine=engine)
    # DDP's buckets are limits in bytes, so a larger byte changes how many there are
    stages = {"pytorch": [1, 2, 3], "torchtitan": [0, 2, 3], "deepspeed": [0, 1, 1]}
    etp = 2 if engine in ("paper", "megatron") else 1
    columns = {"tp": 2, "etp": etp, "pp": 2, "cp": 2, "dp_shard": [2, 4, 8], "num_microbatches": 4}
    plans = plan_of(**columns, sp=int(engine != "deepspeed"), zero_stage=stages.get(engine, [0, 1, 3]))

    def measure() -> tuple[list[list[tuple[int, ...]]], Sequence[tuple[Any, ...]]]:
        inventory = Inventory(setting)
        calls = all_traffic(inventory, shares(inventory, plans))
        moved = [(c.op, c.what, c.count.tolist(), c.in_bytes.tolist(), c.out_bytes.tolist()) for c in calls]
        return state_rows(setting, plans), moved

    states, moved = measure()
    monkeypatch.setattr(dtypes, "BITS", {name: 7 * width for name, width in dtypes.BITS.items()})
    states_7, moved_7 = measure()
    for row, row_7 in zip(states, states_7, strict=True):
        for stage, stage_7 in zip(row, row_7, strict=True):
            assert stage_7[0] == stage[0]
            assert [7 * amount for amount in stage[1:]] == list(stage_7[1:])
    for call, call_7 in zip(moved, moved_7, strict=True):
        assert call[:3] == call_7[:3]
        assert (7 * np.array(call[3]) == np.array(call_7[3])).all()
        assert (7 * np.array(call[4]) == np.array(call_7[4])).all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shards", [1, DEGREE_LIMIT])
def test_the_largest_models_do_not_overflow(engine: str, shards: int) -> None:
    """2**62 bytes at 64 bytes an element are the limit that a model is checked against."""
    model = model_by_hand(hidden=1 << 22, layers=400, heads=8, ffn=1 << 23, vocab=1 << 20, name="huge")
    assert 2**55 < model.total_params < 2**56
    optimizer = "adamw-fused" if engine == "pytorch" else "adamw"
    found = held(setting_of(model, engine=engine, optimizer=optimizer), dp_shard=shards, zero_stage=0)
    exact = {"paper": 16, "pytorch": 16, "torchtitan": 16, "megatron": 18}
    if engine in exact:
        assert found.at("step") == exact[engine] * model.total_params
    for zero_stage in (1, 2, 3):
        if zero_stage == 1 and engine == "torchtitan":
            continue
        sharded = held(setting_of(model, engine=engine), dp_shard=shards, zero_stage=zero_stage)
        assert all(0 <= amount < 2**62 for amount in sharded.bytes.values())
        assert sharded.of("optimizer") * shards >= 8 * model.total_params


@pytest.mark.parametrize("params", [2**56, 2**60, 2**61])
def test_a_larger_model_is_refused(params: int) -> None:
    with pytest.raises(BadInput, match=r"2\*\*62"):
        model_from_count(params)


def test_a_peak_is_the_largest_total_over_stages_and_instants() -> None:
    setting = setting_of(llama("8b"), engine="megatron", recompute="none")
    inventory = Inventory(setting)
    plans = plan_of(pp=4, tp=2, dp_shard=8, zero_stage=1, num_microbatches=8)
    memory = stage_memory(inventory, plans)
    peak = peak_of(memory)
    assert peak.total_bytes == int(memory.allocated[0])
    assert peak.total_bytes == max(peak.at_instants.values())
    held_lines = [line for line in entry(inventory, plans).lines if line.id.startswith("held/")]
    assert {line.pp_stage for line in held_lines} == {peak.pp_stage}
