"""FSDP2 and DDP in PyTorch 2.13, by trainledger's own program and by torchtitan at b5bcd76c66."""

from __future__ import annotations

import pytest

from strategies import Owned, dense, elements, held, llama, owned, plan_of, routed, setting_of, tiny
from trainledger.account.ledger import entry
from trainledger.facts.model import Model
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory

MODELS = {
    "70b": llama("70b"),
    "8b": llama("8b"),
    "small": dense(),
    "odd": dense(hidden=24, heads=3, kv_heads=1, ffn=17),
}
MANY = pytest.mark.parametrize("name", MODELS)
SHARDS = pytest.mark.parametrize("shards", [1, 2, 3, 8, 64, 1000])


def stored(tensors: list[Owned], shards: int) -> int:
    """Elements of one rank's storage: every tensor's rows, chunked and padded to the first chunk."""
    return sum(-(-t.rows // shards) * t.rest * t.times for t in tensors)


def unit(model: Model) -> int:
    """The largest thing that is gathered at once."""
    block = elements(owned(model, layers=range(1), ends=(False, False)))
    ends = [elements(owned(model, layers=range(0), ends=e)) for e in ((True, False), (False, True))]
    return max(block, *ends)


@MANY
@SHARDS
def test_fsdp2_keeps_fp32_shards_and_no_master(name: str, shards: int) -> None:
    """4 + 4 + 8 over N at the step; between steps no gradients; N ranks beyond the rows still store one row each."""
    share = stored(owned(MODELS[name]), shards)
    for engine, optimizer in (("pytorch", "adamw-fused"), ("torchtitan", "adamw")):
        found = held(setting_of(MODELS[name], engine=engine, optimizer=optimizer), dp_shard=shards, zero_stage=3)
        assert found.at("rest") == (4 + 8) * share
        assert found.at("step") == (4 + 4 + 8) * share


@MANY
def test_a_gathered_unit_costs_itself_and_its_output_buffer_and_a_reduction_in_fp32(name: str) -> None:
    model = MODELS[name]
    found = held(setting_of(model, engine="pytorch"), dp_shard=8, zero_stage=3)
    assert found.bytes["buffers", "loss"] == 2 * 2 * unit(model)
    assert found.bytes["buffers", "backward"] == 2 * 2 * unit(model) + 4 * unit(model)


@MANY
def test_pure_bf16_keeps_2_2_and_4(name: str) -> None:
    share = stored(owned(MODELS[name]), 8)
    found = held(setting_of(MODELS[name], engine="pytorch", precision="bf16-pure"), dp_shard=8, zero_stage=3)
    assert found.at("step") - found.bytes["buffers", "step"] == (2 + 2 + 4) * share


@MANY
def test_ddp_keeps_16_bytes_per_parameter_and_a_copy_of_the_gradients_in_its_buckets(name: str) -> None:
    total = MODELS[name].total_params
    setting = setting_of(MODELS[name], engine="pytorch", precision="fp32", optimizer="adamw-fused")
    found = held(setting, dp_shard=8, zero_stage=0)
    assert found.at("step") == (16 + 4) * total
    assert found.at("rest") == (12 + 4) * total


@MANY
@pytest.mark.parametrize(("precision", "plan"), [("bf16", {"dp_shard": 8}), ("fp32", {"dp_shard": 4, "cp": 2})])
def test_replicas_that_ddp_does_not_wrap_compute_with_a_copy_and_have_no_buckets(
    name: str, precision: str, plan: dict[str, int]
) -> None:
    """torch/distributed/_composable/replicate_with_fsdp.py at 2.13.0: units with a shard of one. [torch-replicate]"""
    total, width = MODELS[name].total_params, 2 if precision == "bf16" else 4
    setting = setting_of(MODELS[name], engine="pytorch", precision=precision, optimizer="adamw-fused")
    one, two = (held(setting, zero_stage=0, num_microbatches=batches, **plan) for batches in (1, 2))
    assert (one.at("rest"), one.at("step")) == (12 * total, 16 * total)
    assert one.bytes["weights", "loss"] == (4 + width) * total
    assert (one.bytes["gradients", "loss"], two.bytes["gradients", "loss"]) == (0, 4 * total)


@pytest.mark.parametrize("ranks", [1, 8])
def test_adapters_beside_frozen_weights_are_not_cast_by_a_wrapper(ranks: int) -> None:
    """So nothing gathers a copy of 4-bit weights; several ranks have DDP's buckets, of the adapters alone."""
    workload = Workload(lora_rank=8, lora_targets=("q_proj",), qlora=True)
    found = held(setting_of(MODELS["8b"], workload, engine="pytorch"), dp_shard=ranks, zero_stage=0)
    adapters = 32 * 8 * (4096 + 4096)
    assert found.bytes["weights", "loss"] == found.bytes["weights", "rest"]
    assert found.bytes["buffers", "rest"] == (4 * adapters if ranks > 1 else 0)


def test_one_rank_that_casts_nothing_is_not_wrapped() -> None:
    model = MODELS["small"]
    setting = setting_of(model, engine="pytorch", precision="fp32", optimizer="adamw-fused")
    for zero_stage in (0, 1, 2, 3):
        found = held(setting, zero_stage=zero_stage, num_microbatches=2)
        assert found.at("loss") == found.at("step") == 16 * model.total_params


def test_a_pipeline_stage_gathers_and_reduces_once_whatever_the_zero_stage() -> None:
    """torch/distributed/pipelining/stage.py at 2.13.0: no backward but the last one reduces. [torch-pipeline-fsdp]"""
    model = MODELS["8b"]
    tensors = owned(model, layers=range(16), ends=(True, False))
    whole, share = elements(tensors), stored(tensors, 8)
    for zero_stage in (1, 2, 3):
        found = held(setting_of(model, engine="pytorch"), pp=2, dp_shard=8, zero_stage=zero_stage, num_microbatches=4)
        assert found.bytes["weights", "loss"] == 4 * share + 2 * whole
        assert (found.bytes["gradients", "loss"], found.bytes["gradients", "step"]) == (4 * whole, 4 * share)


@MANY
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
def test_a_foreach_step_holds_square_roots_as_large_as_the_second_moment(name: str, precision: str) -> None:
    """torch/optim/adam.py at 2.13.0: the default on CUDA; fused=True holds none. [torch-foreach]"""
    steps = [
        held(setting_of(MODELS[name], engine="pytorch", precision=precision, optimizer=optimizer), **plan)
        for optimizer in ("adamw", "adamw-fused")
        for plan in ({"dp_shard": 3, "zero_stage": 3},)
    ]
    width = 2 if precision == "bf16-pure" else 4
    assert steps[0].at("step") - steps[1].at("step") == width * stored(owned(MODELS[name]), 3)
    assert all(steps[0].at(instant) == steps[1].at(instant) for instant in ("rest", "loss", "backward"))


@MANY
def test_hybrid_sharding_divides_by_the_inner_group_alone(name: str) -> None:
    model = MODELS[name]
    setting = setting_of(model, engine="pytorch", optimizer="adamw-fused")
    found = held(setting, dp_shard=4, dp_replicate=16, cp=2, zero_stage=3)
    assert found.at("step") == 16 * stored(owned(model), 8)


@MANY
def test_stages_1_and_2_gather_once_and_keep_16_bit_weights_through_the_step(name: str) -> None:
    model = MODELS[name]
    share = stored(owned(model), 8)
    for stage in (1, 2):
        one = held(setting_of(model, engine="pytorch"), dp_shard=8, zero_stage=stage)
        two = held(setting_of(model, engine="pytorch"), dp_shard=8, zero_stage=stage, num_microbatches=2)
        assert one.at("rest") == 12 * share
        assert one.bytes["weights", "loss"] == 4 * share + 2 * model.total_params
        assert one.bytes["gradients", "step"] == 4 * share
        assert one.bytes["buffers", "backward"] == 4 * unit(model)
        # stage 2 accumulates on the shard, stage 1 keeps whole gradients in the reduction's dtype
        assert two.bytes["gradients", "loss"] == (4 * model.total_params if stage == 1 else 4 * share)


def test_an_fp8_gather_carries_matrices_in_one_byte_and_the_rest_in_two() -> None:
    model = MODELS["70b"]
    matrices = elements([t for t in owned(model) if t.tensor.linear and t.tensor.role != "head"])
    setting = setting_of(model, engine="pytorch", precision="fp8-tensorwise")
    two, three = (held(setting, dp_shard=64, zero_stage=stage) for stage in (2, 3))
    share = stored(owned(model), 64)
    assert two.bytes["weights", "loss"] - 4 * share == matrices + 2 * (model.total_params - matrices)
    embedding = model.vocab_size * model.hidden_size
    assert three.bytes["buffers", "loss"] == 2 * 2 * (embedding + model.hidden_size)


@pytest.mark.parametrize(("engine", "recipe"), [("pytorch", "fp8-rowwise"), ("torchtitan", "fp8-rowwise")])
def test_torchao_keeps_no_fp8_copies(engine: str, recipe: str) -> None:
    columns = {"dp_shard": 64, "zero_stage": 3}
    assert held(setting_of(MODELS["8b"], engine=engine, precision=recipe), **columns) == held(
        setting_of(MODELS["8b"], engine=engine), **columns
    )


def test_torchtitan_keeps_weights_gathered_and_gradients_whole_through_a_pipeline() -> None:
    model = MODELS["8b"]
    tensors = owned(model, layers=range(16), ends=(True, False))
    found = held(setting_of(model, engine="torchtitan"), pp=2, dp_shard=8, zero_stage=3, num_microbatches=4)
    share = stored(tensors, 8)
    assert found.bytes["weights", "loss"] == 4 * share + 2 * elements(tensors)
    assert found.bytes["gradients", "loss"] == 4 * elements(tensors)
    assert found.bytes["gradients", "step"] == 4 * share


def test_torchtitan_stages_lose_a_layer_at_each_end() -> None:
    inventory = Inventory(setting_of(llama("70b"), engine="torchtitan"))
    counts = inventory.stages(4, 1).counts[:, 1].tolist()
    assert inventory.stages(4, 1).pp_stage.tolist() == [0, 1, 2, 3]
    assert counts == [20, 21, 20, 19]


@pytest.mark.parametrize("shards", [1, 2, 4, 8, 16, 32])
def test_experts_are_cut_along_experts_then_along_their_rows(shards: int) -> None:
    """torchtitan shards [experts, rows, columns] on dim 1 where more ranks than experts share it. [fsdp.py 276-291]"""
    model = routed()
    tensors = owned(model, ep=2, etp=1)
    found = held(setting_of(model, engine="torchtitan"), ep=2, etp=1, dp_shard=shards * 2, zero_stage=3)
    local = 8 // 2
    share = stored([t for t in tensors if not t.expert], 2 * shards)
    for t in (t for t in tensors if t.expert):
        experts_or_rows = -(-local // shards) * t.rows if shards <= local else local * -(-t.rows // shards)
        share += experts_or_rows * t.rest * t.times // local
    assert found.at("step") == 16 * share


def test_as_many_ranks_as_experts_take_one_each() -> None:
    """Three experts on three ranks are cut along the experts, though 64 rows do not divide by three."""
    model = routed(3)
    tensors = owned(model)
    share = stored([t for t in tensors if not t.expert], 3) + elements([t for t in tensors if t.expert]) // 3
    assert held(setting_of(model, engine="torchtitan"), dp_shard=3, zero_stage=3).at("step") == 16 * share


def test_cpu_offload_moves_shards_gradients_and_moments() -> None:
    found = held(setting_of(MODELS["8b"], engine="pytorch", offload=("parameters",)), dp_shard=8, zero_stage=3)
    assert found.host == 16 * stored(owned(MODELS["8b"]), 8)
    assert found.at("step") == 0


def test_what_was_measured_of_the_small_decoder_on_4_cpu_ranks() -> None:
    """Per rank, fp32, 869,504 parameters: N/4 of each state under FSDP2, N each under DDP; AdamW8bit 2.110 B/param."""
    quarter, whole = 3_478_016 // 4, 3_478_016
    sharded = held(setting_of(tiny(), engine="pytorch", precision="fp32"), dp_shard=4, zero_stage=3)
    assert (sharded.of("weights"), sharded.of("gradients"), sharded.of("optimizer")) == (quarter, quarter, 2 * quarter)
    hybrid = held(setting_of(tiny(), engine="pytorch", precision="fp32"), dp_shard=2, dp_replicate=2, zero_stage=3)
    assert (hybrid.of("weights"), hybrid.of("optimizer")) == (whole // 2, whole)
    replicated = held(setting_of(tiny(), engine="pytorch", precision="fp32"), dp_shard=4, zero_stage=0)
    assert (replicated.of("weights"), replicated.of("optimizer")) == (whole, 2 * whole)
    for optimizer, measured in (("adamw-8bit", 2.110), ("adamw-fp8", 2.039)):
        found = held(setting_of(tiny(), engine="pytorch", precision="fp32", optimizer=optimizer), zero_stage=0)
        assert found.of("optimizer") / tiny().total_params == pytest.approx(measured, abs=5e-4)


def test_on_3_ranks_moments_are_those_of_the_largest_shard() -> None:
    """Measured: Adam holds 2,336,792 B on ranks 0 and 1 and 2,282,448 on rank 2; storages are equal and padded."""
    found = held(setting_of(tiny(), engine="pytorch", precision="fp32"), dp_shard=3, zero_stage=3)
    assert found.of("optimizer") == 2_336_792 // 8 * 8


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("model", [dense(tied=True), routed(), llama("8b")], ids=["tied", "routed", "8b"])
def test_line_ids_are_unique(model: Model, zero_stage: int) -> None:
    workload = Workload(lora_rank=4, lora_targets=("all-linear",), qlora=True, frozen_copy=1, ema=True)
    for setting in (setting_of(model, engine="pytorch"), setting_of(model, workload, engine="pytorch")):
        plan = plan_of(dp_shard=8, pp=2, tp=2, etp=1, zero_stage=zero_stage, num_microbatches=4)
        ids = [line.id for line in entry(Inventory(setting), plan).lines]
        assert len(ids) == len(set(ids))
