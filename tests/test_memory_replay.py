"""A run as requests to the allocator: what it asks for comes to what the places of a step add up to."""

from __future__ import annotations

import time

import pytest

from strategies import dense, latent, llama, plan_of, routed, setting_of
from trainledger.account.memory.reserved.allocator import Event, replay
from trainledger.account.memory.reserved.replay import events_of, reserved_of
from trainledger.account.memory.stage import stage_memory
from trainledger.facts.model import Model
from trainledger.facts.model_load import load_model
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Plans

ENGINES = ("paper", "pytorch", "torchtitan", "deepspeed", "megatron")
MODELS = {"dense": dense, "routed": routed, "latent": latent}


def inventory_of(model: Model, seq: int = 128, **scenario: object) -> Inventory:
    return Inventory(setting_of(model, Workload(seq=seq), **scenario))


def asked(events: list[Event]) -> list[int]:
    """The most bytes that are alive after each alloc and free, rounded to nothing."""
    sizes: dict[int, int] = {}
    alive: list[int] = []
    now = 0
    for op, name, nbytes, _ in events:
        now += nbytes if op == "alloc" else -sizes.pop(name)
        if op == "alloc":
            sizes[name] = nbytes
        alive.append(now)
    return alive


def ratio(inventory: Inventory, plans: Plans) -> float:
    """What a replayed run has alive at its most, over what the places of a step come to."""
    stages = stage_memory(inventory, plans)
    return max(asked(events_of(inventory, plans, stages.where()[1]))) / int(stages.allocated[0])


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("engine", ["paper", "megatron"])
def test_where_states_stay_for_the_whole_run_both_agree_to_the_byte(engine: str, model: str, recompute: str) -> None:
    inventory = inventory_of(MODELS[model](), engine=engine, recompute=recompute)
    for columns in ({"mbs": 4}, {"num_microbatches": 3}, {"tp": 2, "sp": 1}, {"cp": 2}, {"dp_shard": 4}):
        assert ratio(inventory, plan_of(**columns)) == 1


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("engine", ["pytorch", "deepspeed"])
def test_where_states_come_and_go_both_agree_with_gradients_that_are_there_before(engine: str, recompute: str) -> None:
    inventory = inventory_of(dense(), engine=engine, recompute=recompute)
    for columns in ({"num_microbatches": 4}, {"dp_shard": 4, "zero_stage": 3, "num_microbatches": 2}):
        assert ratio(inventory, plan_of(mbs=4, **columns)) == 1


FSDP2 = (
    {"dp_shard": 8},
    {"dp_shard": 8, "num_microbatches": 3},
    {"dp_shard": 4, "dp_replicate": 2},
    {"dp_shard": 4, "tp": 2, "sp": 1},
    {"dp_shard": 2, "cp": 4},
    {"dp_replicate": 8, "zero_stage": 0},
    {"dp_shard": 4, "pp": 2, "num_microbatches": 4},
)


@pytest.mark.parametrize("columns", FSDP2, ids=str)
@pytest.mark.parametrize("words", [{"compile": "on"}, {"compile": "off", "recompute": "selective"}], ids=str)
def test_units_agree_where_each_is_reduced_by_itself(words: dict[str, str], columns: dict[str, int]) -> None:
    scenario = {"recompute": "none", "framework_version": "2025-08", **words}
    inventory = inventory_of(llama("8b"), seq=4096, engine="torchtitan", **scenario)
    assert ratio(inventory, plan_of(**{"zero_stage": 3, **columns})) == pytest.approx(1, abs=2e-4)


KNOBS = (*FSDP2, {"dp_shard": 8, "zero_stage": 1}, {"dp_shard": 8, "zero_stage": 2, "num_microbatches": 3})


@pytest.mark.parametrize("columns", [*KNOBS, {"dp_shard": 8, "zero_stage": 1, "num_microbatches": 3}], ids=str)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_knobs_of_each_zero_stage_agree(recompute: str, columns: dict[str, int]) -> None:
    inventory = inventory_of(llama("8b"), seq=4096, engine="pytorch", recompute=recompute)
    assert ratio(inventory, plan_of(**{"zero_stage": 3, **columns})) == pytest.approx(1, abs=2e-4)


@pytest.mark.parametrize("recompute", ["none", "every-2", "selective", "full"])
@pytest.mark.parametrize("release", ["2025-01", "2025-06", "2025-08"])
def test_units_agree_in_every_release(release: str, recompute: str) -> None:
    scenario = {"recompute": recompute, "framework_version": release, "compile": "on"}
    inventory = inventory_of(llama("8b"), seq=4096, engine="torchtitan", **scenario)
    # of the block that runs backward second the places know only that one of some kind has run before
    exact = recompute != "every-2"
    assert ratio(inventory, plan_of(dp_shard=8, zero_stage=3)) == pytest.approx(1, abs=2e-4 if exact else 0.02)


def test_units_of_experts_and_tied_ends_agree() -> None:
    plans = plan_of(dp_shard=8, zero_stage=3)
    scenario = {"engine": "torchtitan", "framework_version": "2025-08", "recompute": "none"}
    assert ratio(inventory_of(load_model("llama-3.2-1b"), seq=4096, **scenario), plans) == pytest.approx(1, abs=2e-4)
    experts = inventory_of(load_model("mixtral-8x7b"), seq=4096, **scenario)
    for ep in (1, 8):
        assert ratio(experts, plan_of(dp_shard=8, zero_stage=3, ep=ep)) == pytest.approx(1, abs=5e-4)


@pytest.mark.parametrize("release", ["2024-07", "2024-09"])
def test_gradients_that_wait_and_tables_that_stay_agree(release: str) -> None:
    for tied in (False, True):
        inventory = inventory_of(dense(tied=tied), engine="nanotron", framework_version=release, recompute="none")
        for columns in ({"tp": 2, "sp": 1}, {"dp_shard": 4, "num_microbatches": 3}, {"pp": 2, "num_microbatches": 4}):
            assert ratio(inventory, plan_of(mbs=4, zero_stage=1, **columns)) == pytest.approx(1, abs=2e-4)


def test_a_pipeline_reduces_unit_by_unit_when_its_last_backward_is_over() -> None:
    inventory = inventory_of(load_model("mixtral-8x7b"), seq=2048, engine="torchtitan", framework_version="2025-08")
    plans = plan_of(pp=2, dp_shard=2, num_microbatches=6, zero_stage=3)
    assert ratio(inventory, plans) == pytest.approx(1, abs=5e-4)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("engine", ["pytorch", "torchtitan", "megatron"])
def test_each_stage_of_a_pipeline_agrees(engine: str, stage: int) -> None:
    inventory = inventory_of(dense(layers=8), engine=engine, recompute="none")
    plans = plan_of(mbs=4, pp=4, num_microbatches=8)
    stages = stage_memory(inventory, plans)
    for row, pp_stage in enumerate(stages.pp_stage[0]):
        if pp_stage == stage:
            whole = max(int(stages.total(index)[0, row]) for index in range(len(stages.places)))
            # a whole loss waits beside layers as small as these where logits are held until their backward
            assert max(asked(events_of(inventory, plans, row))) == pytest.approx(whole, rel=0.02)


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
@pytest.mark.parametrize("engine", ["pytorch", "megatron"])
def test_schedules_of_many_chunks_hold_as_many_as_their_closed_form_says(engine: str, schedule: str) -> None:
    inventory = inventory_of(dense(layers=8), engine=engine, recompute="none", schedule=schedule)
    # gradients that wait for those of weights do so on the run's own clock: more where layers are as small as these
    waits = engine == "pytorch" and schedule == "zero-bubble"
    plans = plan_of(mbs=4, pp=2, vpp=2, num_microbatches=8)
    assert ratio(inventory, plans) == pytest.approx(1, rel=0.1 if waits else 0.02)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "zb-1p", "zb-2p", "zero-bubble"])
@pytest.mark.parametrize("release", ["", "zero-bubble"])
def test_what_waits_for_its_turn_or_for_gradients_of_weights_agrees_on_every_stage(release: str, schedule: str) -> None:
    scenario = {"engine": "megatron", "framework_version": release, "recompute": "none"}
    inventory = Inventory(setting_of(dense(layers=8), Workload(seq=128), schedule=schedule, **scenario))
    plans = plan_of(mbs=4, pp=4, num_microbatches=12)
    stages = stage_memory(inventory, plans)
    for row in range(len(stages.pp_stage[0])):
        whole = max(int(stages.total(index)[0, row]) for index in range(len(stages.places)))
        assert max(asked(events_of(inventory, plans, row))) == pytest.approx(whole, rel=5e-4)


def test_a_run_lets_go_of_all_that_a_step_made() -> None:
    for engine in ENGINES:
        inventory = inventory_of(latent(), engine=engine, recompute="none")
        plans = plan_of(num_microbatches=2)
        ends = [asked(events_of(inventory, plans, 0, steps=steps))[-1] for steps in (1, 2, 3)]
        assert ends[0] == ends[1] == ends[2]


def test_moments_are_made_in_the_first_step_and_not_again() -> None:
    inventory = inventory_of(dense(), engine="torchtitan", recompute="none")
    plans = plan_of(dp_shard=4, zero_stage=3)
    peaks = [max(asked(events_of(inventory, plans, 0, steps=steps))) for steps in (1, 2, 3)]
    assert peaks[0] < peaks[1] == peaks[2]


def test_every_storage_is_let_go_of_once_after_it_was_made() -> None:
    for engine in ENGINES:
        inventory = inventory_of(routed(), engine=engine, recompute="full")
        alive: set[int] = set()
        for op, name, nbytes, _ in events_of(inventory, plan_of(num_microbatches=2, dp_shard=2), 0):
            if op == "alloc":
                assert nbytes > 0
                assert name not in alive
                alive.add(name)
            else:
                alive.remove(name)


@pytest.mark.parametrize("expandable", [False, True])
def test_further_steps_reserve_no_more(expandable: bool) -> None:
    """Llama-3 8B on 8 ranks, whose default segments need a third step."""
    inventory = inventory_of(llama("8b"), seq=4096, engine="pytorch", recompute="none")
    plans = plan_of(dp_shard=8, zero_stage=3)
    more = replay(events_of(inventory, plans, 0, steps=5), expandable=expandable)
    assert reserved_of(inventory, plans, expandable=expandable).max_reserved == more.max_reserved


def test_the_stage_that_reserves_most_need_not_be_the_one_that_allocates_most() -> None:
    inventory = inventory_of(load_model("llama-3.1-405b"), seq=8192, engine="torchtitan", framework_version="2024-12")
    plans = plan_of(tp=8, sp=1, pp=8, dp_shard=8, zero_stage=3, num_microbatches=8, mbs=4)
    most = [replay(events_of(inventory, plans, row, steps=2), expandable=True).max_reserved for row in (0, 1)]
    assert stage_memory(inventory, plans).where()[1] == 0
    assert reserved_of(inventory, plans, expandable=True).max_reserved == max(most) > most[0]


def test_more_micro_batches_than_a_stage_can_have_in_flight_add_no_requests() -> None:
    inventory = inventory_of(dense(layers=8), engine="megatron", recompute="none")
    sizes = [len(events_of(inventory, plan_of(pp=4, num_microbatches=n), 0)) for n in (4, 8, 64, 512)]
    assert sizes[0] < sizes[1] == sizes[2] == sizes[3]


@pytest.mark.parametrize("expandable", [False, True])
def test_reserved_is_never_below_allocated_and_a_limit_refuses(expandable: bool) -> None:
    inventory = inventory_of(dense(), engine="torchtitan", recompute="none")
    plans = plan_of(mbs=4)
    got = reserved_of(inventory, plans, expandable=expandable)
    assert int(stage_memory(inventory, plans).allocated[0]) <= got.max_allocated <= got.max_reserved
    tight = reserved_of(inventory, plans, expandable=expandable, limit_bytes=got.max_allocated // 2)
    assert tight.refused


def test_a_replay_of_a_large_model_takes_a_moment() -> None:
    inventory = inventory_of(llama("70b"), seq=8192, engine="megatron", recompute="none")
    plans = plan_of(tp=8, sp=1, dp_shard=8, zero_stage=1)
    events = events_of(inventory, plans, 0)
    least = min(_seconds(events) for _ in range(5))
    assert least < 5e-6 * len(events)


def _seconds(events: list[Event]) -> float:
    start = time.process_time()
    replay(events, expandable=True)
    return time.process_time() - start
