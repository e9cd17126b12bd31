"""A search adds up, offers what its own ledger confirms, and names a change that really fits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from trainledger.account.ledger import entry
from trainledger.account.memory import device_bytes, stage_memory
from trainledger.account.peak import peak_of
from trainledger.account.states import state_account
from trainledger.errors import Refused
from trainledger.facts.cluster import find_accelerator, find_cluster
from trainledger.facts.model_load import load_model
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Plans, Scenario, make_plans
from trainledger.plans.setting import Setting, make_setting
from trainledger.search import change as changes
from trainledger.search.search import PARETO_LIMIT, Sort, run_search


def setting_of(model: str, card: str, workload: Workload | None = None, **scenario: object) -> Setting:
    return make_setting(
        load_model(model),
        workload or Workload(),
        Scenario(**scenario),  # pyright: ignore[reportArgumentType]
        accelerator=find_accelerator(card),
    )


def total_of(setting: Setting, plan: dict[str, int], recompute: str, **scenario: object) -> int:
    inventory = Inventory(setting.under(recompute=recompute, **scenario))
    plans = make_plans(plan)
    return peak_of(stage_memory(inventory, plans)).total_bytes


@pytest.mark.parametrize(("model", "gpus"), [("llama-3-70b", 64), ("mixtral-8x7b", 16)])
@pytest.mark.parametrize("engine", ["paper", "pytorch", "megatron"])
def test_what_is_offered_is_what_its_ledger_says(model: str, gpus: int, engine: str) -> None:
    setting = setting_of(model, "h100", Workload(gbs=64), engine=engine)
    result = run_search(setting, gpus=gpus, fixed={}, recomputes=("none", "full"), top=5)
    assert result.evaluated == result.accepted + sum(result.rejected.values())
    assert result.plans == sorted(result.plans, key=lambda one: -one.headroom_bytes)
    usable = find_accelerator("h100").usable_bytes
    for one in result.plans:
        inventory = Inventory(setting.under(recompute=one.recompute))
        peak = entry(inventory, make_plans(one.plan)).peak
        assert (peak.total_bytes, peak.pp_stage, peak.instant) == (one.total_bytes, one.pp_stage, one.instant)
        assert one.device_bytes == device_bytes(inventory, make_plans(one.plan)) >= peak.device_bytes
        assert one.headroom_bytes == usable - one.device_bytes >= 0


@pytest.mark.parametrize(
    ("model", "gpus", "card", "workload", "fixed"),
    [
        ("gemma-2-27b", 16, "a100-40gb", Workload(gbs=32), {"mbs": 4, "zero_stage": 1, "tp": 2, "pp": 1, "cp": 1}),
        ("gpt-oss-20b", 8, "h100", Workload(gbs=16), {"mbs": 2, "zero_stage": 1, "tp": 1, "pp": 1, "cp": 1}),
        ("nemotron-h-56b", 64, "a100-40gb", Workload(gbs=64), {"mbs": 2, "zero_stage": 0, "tp": 2, "pp": 4, "cp": 1}),
        ("llama-3-70b", 8, "h100", Workload(), {"zero_stage": 3}),
        ("llama-3-70b", 3, "h100", Workload(), {"zero_stage": 3}),
    ],
)
@pytest.mark.parametrize("engine", ["paper", "pytorch", "deepspeed"])
def test_the_smallest_change_fits_when_it_is_made(
    model: str, gpus: int, card: str, workload: Workload, fixed: dict[str, int], engine: str
) -> None:
    setting = setting_of(model, card, workload, engine=engine)
    result = run_search(setting, gpus=gpus, fixed=fixed, recomputes=("none",), top=1)
    change = result.smallest_change
    if result.plans or change is None:
        return
    scenario: dict[str, object] = {}
    if change.knob == "optimizer":
        scenario["optimizer"] = change.after
    elif change.knob == "loss":
        scenario["loss"] = change.after
    elif change.knob == "offload":
        scenario["offload"] = tuple(change.after.split(","))
    else:
        assert change.after in {str(value) for value in (*change.plan.values(), change.recompute)} | {
            str(make_plans(change.plan).gpus[0])
        }
    assert total_of(setting, change.plan, change.recompute, **scenario) == change.total_bytes
    assert change.total_bytes <= find_accelerator(card).usable_bytes
    if workload.gbs is not None:
        dp = change.plan["dp_replicate"] * change.plan["dp_shard"]
        assert change.plan["num_microbatches"] == workload.gbs // (change.plan["mbs"] * dp)


def test_logits_that_do_not_fit_are_computed_otherwise_before_anything_is_divided() -> None:
    """Of three copies of the logits a compiled loss keeps fewer, and a chunked one a part."""
    fixed = {"zero_stage": 3, "mbs": 1, "tp": 1, "pp": 1, "cp": 4}
    asked: list[tuple[str, str, str]] = []
    for seq, before in ((131072, ""), (655360, ""), (655360, "chunked")):
        setting = setting_of("llama-3-8b", "h200", Workload(seq=seq), engine="torchtitan", loss=before)
        change = changes.smallest_change(setting, make_plans({**fixed, "dp_shard": 2}), 2)
        assert change is None or change.total_bytes <= find_accelerator("h200").usable_bytes
        asked.append((change.knob, change.before, change.after) if change is not None else ("", "", ""))
    assert asked[0] == ("loss", "eager", "compiled")
    assert asked[1] == ("loss", "eager", "chunked")
    assert asked[2][0] != "loss"


def test_deepspeed_is_offered_more_tensor_parallelism() -> None:
    setting = setting_of("llama-3-8b", "a100-40gb", Workload(gbs=8, seq=32768), engine="deepspeed")
    fixed = {"zero_stage": 3, "mbs": 1, "tp": 1, "pp": 1, "cp": 1}
    change = run_search(setting, gpus=8, fixed=fixed, recomputes=("full",), top=1).smallest_change
    assert change is not None
    assert (change.knob, change.plan["sp"]) == ("tp", 0)


def test_many_gpus_are_not_tried_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each asks for a replay of a run; what is found fits, and one GPU less of a rank's does not."""
    setting = setting_of("llama-3-8b", "rtx-4090", Workload(seq=512), engine="megatron")
    plans = make_plans({"dp_shard": 2, "zero_stage": 3})
    asked: list[int] = []

    def counted(inventory: Inventory, one: Plans, *, usable: int | None = None) -> int:
        del usable
        asked.append(int(one.gpus[0]))
        # as if the allocator kept half a card beside
        return device_bytes(inventory, one) + (12 << 30)

    monkeypatch.setattr(changes, "device_bytes", counted)
    found = changes.smallest_change(setting, plans, 2)
    assert found is not None
    assert (found.knob, len(asked) < 20) == ("gpus", True)
    inventory, usable = Inventory(setting), find_accelerator("rtx-4090").usable_bytes
    gpus = int(found.after)
    assert counted(inventory, make_plans({"dp_shard": gpus, "zero_stage": 3})) <= usable
    assert counted(inventory, make_plans({"dp_shard": gpus - 2, "zero_stage": 3})) > usable


@pytest.mark.parametrize("sort", ["headroom", "traffic"])
@pytest.mark.parametrize("seq", [65536, 90112, 114688, 131072])
@pytest.mark.parametrize("top", [2, 5])
def test_what_fits_is_what_is_offered(sort: Sort, seq: int, top: int) -> None:
    """Where the allocator decides: none is said to fit that no offer is, and each offer fits."""
    setting = setting_of("llama-3.2-1b", "a100-40gb", Workload(seq=seq), engine="megatron", optimizer="adamw-bf16")
    setting = dataclasses.replace(setting, reserve_bytes=3 << 30)
    result = run_search(setting, gpus=4, fixed={"zero_stage": 1}, recomputes=("full",), top=top, sort=sort)
    assert result.evaluated == result.accepted + sum(result.rejected.values())
    assert bool(result.plans) == bool(result.pareto) == bool(result.accepted) != bool(result.smallest_change)
    assert len(result.plans) == min(top, result.accepted)
    assert all(one.headroom_bytes >= 0 for one in (*result.plans, *result.pareto))
    if result.pareto:
        assert result.pareto[0].headroom_bytes >= max(one.headroom_bytes for one in result.plans)


def test_a_long_front_keeps_both_its_ends() -> None:
    setting = setting_of("gpt2", "mi300x", engine="paper")
    result = run_search(setting, gpus=24, fixed={}, recomputes=("none", "full"), top=10_000)
    assert result.pareto_size > PARETO_LIMIT == len(result.pareto)
    assert result.pareto[0].device_bytes == min(one.device_bytes for one in result.plans)
    assert result.pareto[-1].wire_bytes == min(one.wire_bytes for one in result.plans)
    wires = [one.wire_bytes for one in result.pareto]
    assert wires == sorted(wires, reverse=True)


def test_one_rule_that_forbids_everything_is_raised() -> None:
    setting = setting_of("llama-3-8b", "h100", Workload(lora_rank=8), engine="megatron")
    with pytest.raises(Refused, match=r"^\[engine-lora\]"):
        run_search(setting, gpus=8, fixed={}, recomputes=("full",), top=1)


def test_traffic_ranks_the_other_way_and_a_reserve_takes_room() -> None:
    setting = setting_of("mixtral-8x7b", "h100", Workload(gbs=256), engine="megatron")
    found = [
        run_search(one, gpus=32, fixed={}, recomputes=("full",), top=20, sort="traffic")
        for one in (setting, dataclasses.replace(setting, reserve_bytes=20 << 30))
    ]
    wires = [one.wire_bytes for one in found[0].plans]
    assert wires == sorted(wires)
    assert wires[0] == found[0].pareto[-1].wire_bytes
    assert found[1].accepted < found[0].accepted
    usable = find_accelerator("h100").usable_bytes - (20 << 30)
    assert all(one.device_bytes + one.headroom_bytes == usable for one in found[1].plans)


def test_a_host_too_small_is_not_offered() -> None:
    cluster = find_cluster("dgx-h100")
    setting = dataclasses.replace(
        setting_of("llama-3.1-405b", "h100", engine="deepspeed", offload=("optimizer", "parameters")), cluster=cluster
    )
    share = cluster.host_share_bytes(8)
    assert share is not None
    result = run_search(setting, gpus=8, fixed={"zero_stage": 3}, recomputes=("full",), top=1)
    assert not result.plans
    assert result.rejected["does-not-fit"] > 0
    inventory = Inventory(setting)
    plans = make_plans({"dp_shard": 8, "zero_stage": 3})
    assert np.max(state_account(inventory, plans).host) > share


def test_multi_token_prediction_is_trained() -> None:
    plain, more = (
        Inventory(setting_of("deepseek-v3", "h200", Workload(mtp=mtp), recompute="none")) for mtp in (False, True)
    )
    plans = make_plans({"tp": 2, "sp": 1, "dp_shard": 64, "ep": 64, "etp": 1})
    calls = [
        {(m.collective, m.group, m.what): m.count for m in entry(inventory, plans).traffic}
        for inventory in (plain, more)
    ]
    layers = 61
    moe_layers = layers - 3
    assert calls[1]["all_to_all", "ep", "routed tokens"] * moe_layers == (
        calls[0]["all_to_all", "ep", "routed tokens"] * (moe_layers + 1)
    )
    assert calls[1]["all_reduce", "tp", "loss statistics"] == 2 * calls[0]["all_reduce", "tp", "loss statistics"]
    assert stage_memory(more, plans).saved[0, 0] > stage_memory(plain, plans).saved[0, 0]


def test_a_change_of_the_scenario_keeps_the_rest_of_the_setting() -> None:
    setting = dataclasses.replace(setting_of("llama-3-8b", "h100", engine="megatron"), reserve_bytes=1 << 30)
    changed = setting.under(optimizer="adamw-fp8", offload=("optimizer",))
    assert (changed.reserve_bytes, changed.accelerator, changed.profile) == (
        1 << 30,
        setting.accelerator,
        setting.profile,
    )
    assert {moment.dtype for moment in changed.optimizer.moments} == {"fp8"}
    assert all(moment.layout == "full" for moment in changed.optimizer.moments)
