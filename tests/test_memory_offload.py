"""Activations in host memory: what is on the card is what two layers keep, and the rest is a line of the host."""

from __future__ import annotations

import dataclasses

import pytest

from strategies import dense, plan_of, setting_of
from trainledger.account.memory.outside import outside
from trainledger.account.memory.reserved.replay import events_of, reserved_of
from trainledger.account.memory.stage import StageMemory, stage_memory
from trainledger.account.peak import host_holds, peak_of
from trainledger.account.shares import shares
from trainledger.facts.cluster import find_cluster
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Plans
from trainledger.plans.setting import Setting

LAYERS = 6
ENGINES = [("megatron", "none", 1), ("fsdp1", "full", 3), ("fsdp1", "none", 3), ("deepspeed", "full", 3)]
ENGINE = pytest.mark.parametrize(("engine", "recompute", "zero_stage"), ENGINES)


def of(engine: str, recompute: str, *, layers: int = LAYERS, away: bool = True) -> Setting:
    words = {"engine": engine, "recompute": recompute, "offload": ("activations",) if away else ()}
    return setting_of(dense(layers=layers), Workload(seq=512), **words)


def held(setting: Setting, plans: Plans) -> StageMemory:
    return stage_memory(Inventory(setting), plans)


@ENGINE
def test_all_but_two_layers_wait_on_the_host(engine: str, recompute: str, zero_stage: int) -> None:
    plans = plan_of(dp_shard=4, zero_stage=zero_stage)
    here, two = held(of(engine, recompute, away=False), plans), held(of(engine, recompute, layers=2, away=False), plans)
    away = held(of(engine, recompute), plans)
    assert int(away.saved[0, 0]) == int(two.saved[0, 0])
    assert int(away.saved[0, 0] + away.host[0, 0]) == int(here.saved[0, 0])
    assert away.allocated[0] < here.allocated[0]
    assert peak_of(away).host_bytes == int(away.host[0, 0])


@ENGINE
def test_the_allocator_is_asked_for_what_is_on_the_card(engine: str, recompute: str, zero_stage: int) -> None:
    plans = plan_of(dp_shard=4, zero_stage=zero_stage)
    inventory = Inventory(of(engine, recompute))
    alive: dict[int, int] = {}
    for op, name, nbytes, _ in events_of(inventory, plans, 0):
        if op == "alloc":
            assert name not in alive
            alive[name] = nbytes
        else:
            alive.pop(name)
    found = reserved_of(inventory, plans, expandable=True)
    before = reserved_of(Inventory(of(engine, recompute, away=False)), plans, expandable=True)
    assert found.max_allocated < before.max_allocated
    if engine != "fsdp1":
        assert found.max_allocated == pytest.approx(int(held(of(engine, recompute), plans).allocated[0]), rel=0.03)


def test_the_host_has_a_line_for_a_rank_and_for_a_node() -> None:
    setting, plans = of("megatron", "none"), plan_of(dp_shard=4, zero_stage=1)
    inventory = Inventory(setting)
    memory = stage_memory(inventory, plans)
    lines = {line.what: line for line in outside(inventory, shares(inventory, plans), memory)}
    one, more = lines["offloaded activations"], lines["page-locked memory beyond offloaded activations"]
    assert (one.amount, one.place, one.per) == (int(memory.host[0, 0]), "host", "rank")
    assert lines["offloaded activations of a node"].amount == 4 * (one.amount + more.amount)
    assert not [what for what in lines if "states" in what]


def test_a_node_that_cannot_hold_them_refuses_the_plan() -> None:
    cluster = find_cluster("dgx-h100")
    assert cluster.host_bytes is not None
    found = {}
    for seq in (512, 1 << 26):
        setting = setting_of(
            dense(layers=LAYERS), Workload(seq=seq), engine="megatron", recompute="none", offload=("activations",)
        )
        plans = plan_of(dp_shard=8, zero_stage=1)
        on = dataclasses.replace(setting, cluster=cluster)
        found[seq] = bool(host_holds(on, plans, held(setting, plans))[0])
    assert list(found.values()) == [True, False]
