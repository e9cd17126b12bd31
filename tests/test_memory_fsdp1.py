"""FSDP of flat parameters: what PyTorch's own has alive on one of several ranks, and what passes, counted by hand."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from flat_runs import RANKS, SEQ, Case, Found, kept_by_depth, measured, overrides
from strategies import calls_of, held, llama, one_call, plan_of, setting_of
from trainledger.account.memory.engines.fsdp1 import Fsdp1
from trainledger.account.memory.reserved.replay import events_of, reserved_of
from trainledger.account.memory.stage import stage_memory
from trainledger.account.shares import shares
from trainledger.facts.model_load import load_model
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Scenario
from trainledger.plans.setting import Setting, make_setting
from trainledger.runtime.launch.fork import run_forked

EMBEDDING, BLOCK, FINAL = 0, 1, 2
CASES: list[Case] = [
    (3, "float32", False, 1, 4096, 0),
    (3, "bfloat16", False, 2, 300, 0),
    (2, "float32", False, 2, 300, 0),
    (3, "", False, 1, 300, 0),
    (3, "", False, 1, 300, 2),
    (3, "bfloat16", False, 1, 4096, 2),
    (2, "bfloat16", False, 1, 300, 2),
]


@pytest.fixture(scope="module")
def found() -> dict[Case, Found]:
    (seen,) = run_forked(1, measured, CASES, timeout_s=120)
    return dict(zip(CASES, seen, strict=True))


def around_our_decoder(case: Case) -> Setting:
    """The engine with the tapes of this package's own decoder on a CPU, instead of those of transformers."""
    scenario = Scenario(
        engine="fsdp1",
        precision="bf16" if case[1] else "fp32",
        optimizer="adamw-fused",
        recompute="none",
        grad_dtype="fp32" if case[1] == "float32" else "",
    )
    model = load_model("llama-3-8b", overrides={key: str(value).lower() for key, value in overrides(case).items()})
    setting = make_setting(model, Workload(seq=SEQ, lora_rank=case[5]), scenario)
    memory = msgspec.structs.replace(setting.profile.memory, blocks="eager", workspace_bytes=0)
    return dataclasses.replace(setting, profile=msgspec.structs.replace(setting.profile, memory=memory))


@pytest.mark.parametrize("case", CASES)
def test_pytorch_has_as_much_alive_as_the_ledger_says(case: Case, found: dict[Case, Found]) -> None:
    most, rest, sent = found[case]
    setting, columns = around_our_decoder(case), {"dp_shard": RANKS, "zero_stage": case[0], "num_microbatches": case[3]}
    memory = stage_memory(Inventory(setting), plan_of(**columns))
    # tokens, labels and the loss have no line; beside adapters the next block is there before a block's backward is
    # over, by the last operations of it, and the first layer keeps less, for nothing below it trains
    assert int(memory.allocated[0]) == pytest.approx(most, rel=0.015 if case[5] else 0.001)
    assert held(setting, **columns).at("rest") == pytest.approx(rest, abs=300)
    for op in ("all_gather", "reduce_scatter"):
        call = one_call(calls_of(setting, **columns), op, "dp_shard")
        assert (call.count, call.in_bytes) == sent[op]


MODEL = llama("8b")
E = MODEL.vocab_size * MODEL.hidden_size
R = 2 * E + MODEL.hidden_size
B = sum(t.numel * t.copies for t in MODEL.blocks[0].tensors)


def passing(*, grad_dtype: str = "", **plan: object) -> Fsdp1:
    inventory = Inventory(setting_of(MODEL, engine="fsdp1", grad_dtype=grad_dtype))
    return Fsdp1(inventory, shares(inventory, plan_of(**{"zero_stage": 3, "dp_shard": 8, **plan})))


def bytes_at(found: Fsdp1, part: str, slot: int, *, first: bool = False) -> int:
    return int(found.at(part, slot, first)[0].max())  # type: ignore[arg-type]


def test_a_block_is_gathered_once_beside_the_root_which_stays() -> None:
    assert bytes_at(passing(), "forward", BLOCK) == 2 * B + 2 * R
    assert bytes_at(passing(zero_stage=2), "forward", BLOCK) == 2 * (MODEL.num_layers * B + R)


def test_the_last_block_is_gathered_as_the_loss_begins_its_backward() -> None:
    assert bytes_at(passing(), "backward", FINAL, first=True) == 2 * R + 2 * B


def test_gradients_are_put_side_by_side_and_the_flat_one_is_cast_for_a_reduction_in_fp32() -> None:
    # the block, the next, the root, its output layer's gradients that wait, and the block's twice
    side_by_side = 2 * R + 2 * (E + MODEL.hidden_size) + 2 * B + 2 * B + 2 * 2 * B
    assert bytes_at(passing(), "handed", BLOCK, first=True) == side_by_side
    reduced = 2 * R + 2 * (E + MODEL.hidden_size) + 2 * B + 2 * B + 4 * B + 4 * B // 8
    assert bytes_at(passing(grad_dtype="fp32"), "handed", BLOCK, first=True) == max(side_by_side, reduced)


def test_no_sync_keeps_whole_gradients_in_16_bits_instead_of_shards_in_32() -> None:
    setting = setting_of(MODEL, engine="fsdp1", optimizer="adamw-fused")
    one, two = (held(setting, dp_shard=8, zero_stage=3, num_microbatches=batches) for batches in (1, 2))
    total = MODEL.total_params
    assert (one.bytes["gradients", "loss"], two.bytes["gradients", "loss"]) == (0, 2 * total)
    assert one.at("step") == two.at("step") == 16 * total // 8


def test_composer_reduces_each_micro_batch_and_keeps_shards() -> None:
    setting = setting_of(MODEL, engine="fsdp1", framework_version="composer", grad_dtype="fp32")
    columns: dict[str, object] = {"dp_shard": 8, "zero_stage": 3, "num_microbatches": 3}
    found = held(setting, **columns)
    share = MODEL.total_params // 8
    assert (found.bytes["gradients", "loss"], found.at("rest"), found.at("step")) == (4 * share, 12 * share, 16 * share)
    reduced = one_call(calls_of(setting, **columns), "reduce_scatter", "dp_shard")
    assert (reduced.count, reduced.in_bytes) == (3 * (MODEL.num_layers + 1), 3 * 4 * MODEL.total_params)
    inventory = Inventory(setting)
    several, one = (
        Fsdp1(inventory, shares(inventory, plan_of(**{**columns, "num_microbatches": batches}))) for batches in (3, 1)
    )
    # every shard is there from the first micro-batch on, that of the next block too
    assert bytes_at(several, "backward", BLOCK) - bytes_at(one, "backward", BLOCK) == 4 * (R + 2 * B) // 8


def test_hybrid_sharding_sums_the_shards_of_replicas_once_a_step() -> None:
    setting = setting_of(MODEL, engine="fsdp1")
    calls = calls_of(setting, dp_shard=8, dp_replicate=4, zero_stage=3, num_microbatches=2)
    across = one_call(calls, "all_reduce", "dp_replicate")
    assert (across.count, across.in_bytes) == (MODEL.num_layers + 1, 2 * MODEL.total_params // 8)


ADAPTERS = Workload(lora_rank=8)
QUANTISED = Workload(lora_rank=8, qlora=True)


def test_adapters_pass_alone_and_what_is_frozen_is_gathered_as_it_is_kept() -> None:
    # q: 8 x (4096 + 4096), v: 8 x (4096 + 1024); of 4 bits no scales travel
    low = 8 * (4096 + 4096 + 4096 + 1024)
    plain, packed = (
        Fsdp1(inventory, shares(inventory, plan_of(zero_stage=3, dp_shard=8)))
        for inventory in (Inventory(setting_of(MODEL, work, engine="fsdp1")) for work in (ADAPTERS, QUANTISED))
    )
    matrices = sum(t.numel * t.copies for t in MODEL.blocks[0].tensors if t.linear)
    assert bytes_at(plain, "forward", BLOCK) == 2 * R + 2 * (B + low)
    assert bytes_at(packed, "forward", BLOCK) == 2 * R + 2 * (B - matrices + low) + matrices // 2
    assert (int(plain.summed[0, EMBEDDING]), int(plain.summed[0, BLOCK])) == (0, 2 * low)
    # the block before is asked for by the adapter that runs backward last
    assert bytes_at(plain, "backward", BLOCK, first=True) == 2 * R + 2 * (B + low)
    assert bytes_at(plain, "handed", BLOCK, first=True) >= 2 * R + 4 * (B + low)


def test_scales_of_4_bits_are_whole_on_every_rank_and_on_the_card_when_the_rest_is_not() -> None:
    setting = setting_of(MODEL, QUANTISED, engine="fsdp1", optimizer="adamw-fused")
    away = setting_of(MODEL, QUANTISED, engine="fsdp1", optimizer="adamw-fused", offload=("parameters",))
    matrices = sum(t.numel * t.copies * len(b.layers) for b in MODEL.blocks for t in b.tensors if t.linear)
    adapters = MODEL.num_layers * 8 * (4096 + 4096 + 4096 + 1024)
    rest = MODEL.total_params - matrices
    scales = matrices // 64 + 4 * matrices // (64 * 256)
    found = held(setting, dp_shard=8, zero_stage=3).of("weights")
    assert found == matrices // 2 // 8 + 2 * rest // 8 + 4 * adapters // 8 + scales
    assert held(away, dp_shard=8, zero_stage=3).of("weights") == scales


@pytest.mark.parametrize("engine", ["fsdp1", "pytorch"])
def test_gradients_that_are_offloaded_leave_the_card(engine: str) -> None:
    inventory, plans = (
        Inventory(setting_of(MODEL, engine=engine, offload=("parameters",))),
        plan_of(dp_shard=8, zero_stage=3),
    )
    memory = stage_memory(inventory, plans)
    assert not any(memory.to_come(index).any() for index in range(len(memory.places)))
    names = {name for op, name, _, _ in events_of(inventory, plans, 0) if op == "alloc"}
    names -= {name for op, name, _, _ in events_of(inventory, plans, 0) if op == "free"}
    shares_of = MODEL.total_params * 4 // 8
    left = sum(nbytes for op, name, nbytes, _ in events_of(inventory, plans, 0) if op == "alloc" and name in names)
    assert left < shares_of / 8


def test_behind_a_reentrant_checkpoint_inputs_of_frozen_blocks_and_their_gradients_stay() -> None:
    # the hook that reshards what does not train keeps the inputs of its module until the backward is over
    (seen,) = run_forked(1, kept_by_depth, [4, 12], timeout_s=120)
    hidden = 2 * SEQ * 64
    assert (seen[1] - seen[0]) / 8 == pytest.approx(2 * hidden, rel=0.05)
    for version, times in (("2.6", 2), ("2.13", 1)):
        most = []
        for layers in (4, 12):
            model = load_model("llama-3-8b", overrides={"num_hidden_layers": str(layers)})
            scenario = Scenario(engine="fsdp1", framework_version=version, precision="bf16-pure", recompute="full")
            setting = make_setting(model, Workload(seq=4096, lora_rank=8), scenario)
            memory = stage_memory(Inventory(setting), plan_of(dp_shard=1024, zero_stage=3))
            first = next(i for i, place in enumerate(memory.places) if place.label == "backward of the first layer")
            most.append(int(memory.total(first)[0, 0]))
        assert (most[1] - most[0]) / 8 == pytest.approx((times - 1) * 2 * 2 * 4096 * 4096, abs=2 * 4096 * 4096 / 8)


def test_a_run_reserves_no_less_than_it_has_allocated() -> None:
    inventory = Inventory(setting_of(MODEL, Workload(seq=4096), engine="fsdp1"))
    for plan in ({"zero_stage": 3}, {"zero_stage": 2}, {"zero_stage": 3, "num_microbatches": 2}):
        plans = plan_of(dp_shard=8, **plan)
        found = reserved_of(inventory, plans, expandable=True)
        assert found.max_reserved >= found.max_allocated >= 0.97 * int(stage_memory(inventory, plans).allocated[0])
