"""What the meters of a card show of one peak: sums that must agree, and what lies beside the allocator."""

import dataclasses
import math

import numpy as np
import pytest

from strategies import plan_of, setting_of
from trainledger.account.memory import beside, memory_of, stage_memory
from trainledger.account.memory.bounds import bounds, residual
from trainledger.account.peak import by_basis, peak_of
from trainledger.facts.cluster import find_accelerator
from trainledger.facts.presets import load_preset
from trainledger.inventory.inventory import Inventory

MIB = 1 << 20


def inventory_of(engine: str, model: str = "llama-3-8b", **scenario: object) -> Inventory:
    return Inventory(setting_of(load_preset(model), engine=engine, **scenario))


@pytest.mark.parametrize("engine", ["pytorch", "torchtitan", "megatron", "deepspeed", "paper"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("pp", [1, 4])
def test_what_is_alive_adds_up_to_what_is_allocated(engine: str, recompute: str, pp: int) -> None:
    if engine == "deepspeed" and pp > 1:
        return
    inventory = inventory_of(engine, recompute=recompute)
    plans = plan_of(tp=2, pp=pp, dp_shard=8, zero_stage=0 if engine == "torchtitan" else 1, num_microbatches=8)
    memory = memory_of(inventory, plans)
    allocated = memory.meters["allocated"].estimate
    assert sum(one.amount for one in memory.alive) == allocated == int(stage_memory(inventory, plans).allocated[0])
    assert [one.amount for one in memory.alive] == sorted((one.amount for one in memory.alive), reverse=True)
    assert len({one.name for one in memory.alive}) == len(memory.alive)
    assert all(one.amount % one.storages == 0 for one in memory.alive if one.storages)
    peak = peak_of(stage_memory(inventory, plans))
    assert (peak.total_bytes, peak.place) == (allocated, memory.place)
    assert sum(by_basis(inventory, plans, peak).values()) == allocated


def test_the_device_meter_adds_the_context_and_a_communicator_for_each_group() -> None:
    inventory = inventory_of("megatron")
    one = plan_of(dp_shard=1, zero_stage=1)
    context = sum(line.amount for line in beside(inventory, one))
    assert 400 * MIB < context < 1024 * MIB
    plans = plan_of(tp=2, pp=2, dp_shard=8, zero_stage=1, num_microbatches=8)
    lines = {line.what: line.amount for line in beside(inventory, plans)}
    # the world of 32 and dp of 8 take 688 MiB each, tp and pp of two 544 each
    assert lines["communicators: world of 32, dp_shard of 8, tp of 2, pp of 2"] == (2 * 688 + 2 * 544) * MIB


def test_many_plans_have_beside_them_what_each_has_alone() -> None:
    inventory = inventory_of("megatron")
    plans = plan_of(
        tp=np.array([1, 2, 8]), cp=np.array([1, 2, 1]), dp_shard=np.array([1, 2, 4]), zero_stage=1, num_microbatches=4
    )
    together = stage_memory(inventory, plans)
    for index in range(len(plans)):
        alone = stage_memory(inventory, plans.take(slice(index, index + 1)))
        assert (together.device[index], together.allocated[index]) == (alone.device[0], alone.allocated[0])


def test_amd_pays_more_for_the_first_communicator() -> None:
    setting = setting_of(load_preset("llama-3-8b"), engine="torchtitan")
    amd = Inventory(dataclasses.replace(setting, accelerator=find_accelerator("mi300x")))
    plans = plan_of(dp_shard=8, zero_stage=3)
    lines = [line.amount for line in beside(amd, plans)]
    # two communicators: the world and the sharding group
    assert lines[1] == (1024 + 666) * MIB


def test_an_accounting_on_paper_has_no_device() -> None:
    inventory = inventory_of("paper")
    plans = plan_of(dp_shard=8, zero_stage=1)
    assert beside(inventory, plans) == ()
    assert set(memory_of(inventory, plans).meters) == {"allocated"}


def test_bounds_are_where_published_runs_were_found() -> None:
    """A residual is ln(predicted / measured), so one below zero moves the upper bound."""
    found = residual("torchtitan", "reserved")
    assert found is not None
    assert found.values >= 20
    lower, upper = bounds("torchtitan", "reserved", 1 << 30)
    assert lower <= 1 << 30 <= upper
    assert upper == pytest.approx((1 << 30) * math.exp(-min(found.low, 0)), abs=1)


def test_an_engine_without_published_runs_has_the_bounds_of_all() -> None:
    assert residual("deepspeed", "reserved") == residual("pooled", "reserved")
    assert bounds("deepspeed", "no such meter", 7) == (7, 7)


@pytest.mark.parametrize("engine", ["megatron", "torchtitan", "deepspeed"])
def test_all_tokens_on_one_rank_are_a_bound_and_never_less(engine: str) -> None:
    """Of 8 experts two are chosen: on one of four ranks lie two, so it may get four times its share."""
    plans = plan_of(ep=4, dp_shard=8, zero_stage=1 if engine == "megatron" else 3)
    found = {
        routing: memory_of(inventory_of(engine, "mixtral-8x7b", routing=routing, recompute="none"), plans).meters
        for routing in ("", "balanced", "worst")
    }
    for meter, unsaid in found[""].items():
        assert found["balanced"][meter].estimate == unsaid.estimate < found["worst"][meter].estimate
        assert found["balanced"][meter].upper < unsaid.upper
    more = found["worst"]["allocated"].estimate - found["balanced"]["allocated"].estimate
    assert found[""]["allocated"].upper == found["balanced"]["allocated"].upper + more


def test_without_ranks_of_their_own_experts_get_all_tokens_anyway() -> None:
    plans = plan_of(dp_shard=8, zero_stage=3)
    meters = [
        memory_of(inventory_of("torchtitan", "mixtral-8x7b", routing=routing), plans).meters
        for routing in ("", "worst")
    ]
    assert meters[0] == meters[1]


def test_meters_rise_from_allocated_to_device() -> None:
    """A replay that reserves less than the places of a step add up to does not lower a meter."""
    inventory = inventory_of("deepspeed", "mixtral-8x7b", recompute="none")
    meters = memory_of(inventory, plan_of(pp=8, dp_shard=4, mbs=8, num_microbatches=2, zero_stage=0)).meters
    for under, over in (("allocated", "reserved"), ("reserved", "device")):
        assert meters[under].estimate <= meters[over].estimate
        assert meters[under].lower <= meters[over].lower
