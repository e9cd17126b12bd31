"""Full recomputation of some layers alone: of the first of each virtual stage, and of every N-th."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest

from strategies import calls_of, dense, latent, one_call, plan_of, routed
from trainledger.account.flop import step_flop
from trainledger.account.memory import StageMemory, stage_memory
from trainledger.account.memory.replay import reserved_of
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


def test_every_second_layer_runs_its_own_half_again() -> None:
    flop: list[int] = []
    for how in ("none", "every-2", "full"):
        scenario = Scenario(engine="torchtitan", framework_version="2025-01-15", recompute=how)
        setting = make_setting(dense(), Workload(seq=SEQ), scenario)
        flop.append(int(np.asarray(step_flop(Inventory(setting), plan_of())["matmul"])[0, 0]))
    assert 2 * (flop[1] - flop[0]) == flop[2] - flop[0] > 0
