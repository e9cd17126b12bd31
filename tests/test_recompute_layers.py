"""Full recomputation of some layers alone: of the first of each virtual stage, and of every N-th."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest

from strategies import calls_of, dense, latent, one_call, plan_of, routed
from trainledger.account.flop import step_flop
from trainledger.account.memory import StageMemory, stage_memory
from trainledger.account.memory.reserved.replay import reserved_of
from trainledger.facts.model import Model
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Scenario
from trainledger.plans.setting import Setting, make_setting

SEQ = 256


def recomputing(layers: int, *, model: Model | None = None, recompute: str = "full", **words: object) -> Setting:
    scenario = msgspec.structs.replace(Scenario(engine="megatron", recompute=recompute), **words)
    return make_setting(
        dense() if model is None else model,
        Workload(seq=SEQ),
        msgspec.structs.replace(scenario, recompute_layers=layers),
    )


def held(setting: Setting, **columns: object) -> StageMemory:
    return stage_memory(Inventory(setting), plan_of(num_microbatches=8, **columns))


@pytest.mark.parametrize("columns", [{}, {"pp": 2}, {"pp": 2, "vpp": 2}], ids=["one stage", "two", "interleaved"])
def test_each_layer_that_is_chosen_keeps_its_input_alone(columns: dict[str, object]) -> None:
    interleaved = {"schedule": "interleaved"} if "vpp" in columns else {}
    deep = dense(layers=12)
    kept = [
        held(recomputing(n, model=deep, recompute=how, **interleaved), **columns)
        for how, n in (("none", 0), ("full", 1), ("full", 2), ("full", 0))
    ]
    for more, less in pairwise(kept):
        assert (less.saved <= more.saved).all()
        assert less.allocated[0] < more.allocated[0]
    none, one, two, _ = (int(memory.saved[0, 0]) for memory in kept)
    assert none - one == one - two


def test_more_than_a_chunk_has_is_all_of_it() -> None:
    whole, beyond = (held(recomputing(n), pp=2) for n in (0, 9))
    assert (beyond.allocated == whole.allocated).all()
    assert (beyond.saved == whole.saved).all()


def test_kept_layers_are_gone_when_a_recomputed_one_runs_backward() -> None:
    memory = held(recomputing(3))
    labels = [place.label for place in memory.places]
    again = memory.places[labels.index("backward of the last recomputed layer")]
    kept = memory.places[labels.index("backward of the first kept layer")]
    each = int(memory.saved[0, 0] - held(recomputing(0)).saved[0, 0])
    assert int(again.kept[0, 0]) < each
    assert int(kept.kept[0, 0]) > int(again.kept[0, 0])


def test_they_are_the_first_of_each_chunk_in_the_order_of_the_model() -> None:
    inventory = Inventory(recomputing(2, model=latent()))
    dense_first = len(inventory.setting.model.blocks[0].layers)
    chosen = inventory.recomputed(plan_of())[0, 0]
    assert chosen.tolist() == [min(dense_first, 2), 2 - min(dense_first, 2)]
    staged = Inventory(recomputing(1, model=latent()))
    assert staged.recomputed(plan_of(pp=2, num_microbatches=2)).sum(axis=2).tolist() == [[1, 1]]


def test_the_allocator_is_asked_for_what_the_stage_holds() -> None:
    setting, plan = recomputing(2, model=dense(layers=8)), plan_of(num_microbatches=4)
    asked = reserved_of(Inventory(setting), plan, expandable=True).max_allocated
    assert asked == pytest.approx(int(stage_memory(Inventory(setting), plan).allocated[0]), rel=0.02)


@pytest.mark.parametrize("model", [dense(), routed()], ids=["dense", "routed"])
def test_arithmetic_and_messages_are_those_of_the_layers_that_run_again(model: Model) -> None:
    columns: dict[str, object] = {"tp": 2, "etp": 2, "sp": 1, "num_microbatches": 2}
    flop, calls = [], []
    for how, n in (("none", 0), ("full", 1), ("full", 0)):
        setting = recomputing(n, model=model, recompute=how)
        found = step_flop(Inventory(setting), plan_of(**columns))
        flop.append({name: int(np.asarray(amount)[0, 0]) for name, amount in found.items()})
        calls.append(one_call(calls_of(setting, **columns), "all_gather", "tp", "hidden"))
    none, one, every = flop
    for name, amount in none.items():
        assert (one[name] - amount) * model.num_layers == every[name] - amount
    assert (calls[1].count - calls[0].count) * model.num_layers == calls[2].count - calls[0].count
    assert (calls[1].out_bytes - calls[0].out_bytes) * model.num_layers == calls[2].out_bytes - calls[0].out_bytes


def test_a_region_keeps_one_input_and_runs_again_whole() -> None:
    deep = dense(layers=12)
    one, four = (held(recomputing(0, model=deep, recompute=how)) for how in ("full", "uniform-4"))
    each = int(one.saved[0, 0] - held(recomputing(0, model=dense(layers=11))).saved[0, 0])
    assert int(one.saved[0, 0] - four.saved[0, 0]) == (12 - 3) * each
    labels = [place.label for place in four.places]
    again = four.places[labels.index("backward of the last region of 4 layers")]
    kept = int(held(recomputing(0, model=dense(layers=1), recompute="none")).saved[0, 0])
    once = int(one.places[[place.label for place in one.places].index("backward of the last layer")].walked[0, 0])
    beside = int(held(recomputing(0, model=dense(layers=1))).saved[0, 0]) - each
    # three more layers keep what a layer that is not recomputed does; the region's input is one of them
    assert int(again.walked[0, 0]) == once + 3 * (kept - beside)


def test_the_last_region_of_a_virtual_stage_may_be_short() -> None:
    deep, words = dense(layers=20), {"schedule": "interleaved"}
    columns: dict[str, object] = {"pp": 2, "vpp": 2}
    full, some = (held(recomputing(0, model=deep, recompute=how, **words), **columns) for how in ("full", "uniform-2"))
    # of five layers three regions
    assert int(full.saved[0, 0]) > int(some.saved[0, 0]) > int(full.saved[0, 0]) * 3 // 5 - 1


@pytest.mark.parametrize("how", ["full", "uniform-2"])
def test_regions_repeat_the_arithmetic_of_every_layer(how: str) -> None:
    found = step_flop(Inventory(recomputing(0, recompute=how)), plan_of())
    whole = step_flop(Inventory(recomputing(0)), plan_of())
    assert all((np.asarray(found[name]) == np.asarray(amount)).all() for name, amount in whole.items())


def test_the_allocator_is_asked_for_regions() -> None:
    setting, plan = recomputing(0, model=dense(layers=10), recompute="uniform-4"), plan_of(num_microbatches=4)
    asked = reserved_of(Inventory(setting), plan, expandable=True).max_allocated
    assert asked == pytest.approx(int(stage_memory(Inventory(setting), plan).allocated[0]), rel=0.02)


def test_every_second_layer_runs_its_own_half_again() -> None:
    flop: list[int] = []
    for how in ("none", "every-2", "full"):
        scenario = Scenario(engine="torchtitan", framework_version="2025-01-15", recompute=how)
        setting = make_setting(dense(), Workload(seq=SEQ), scenario)
        flop.append(int(np.asarray(step_flop(Inventory(setting), plan_of())["matmul"])[0, 0]))
    assert 2 * (flop[1] - flop[0]) == flop[2] - flop[0] > 0
