"""DeepSpeed at edaa722126: what each optimizer wrapper keeps, per parameter and to the byte."""

from __future__ import annotations

import pytest

from strategies import dense, elements, held, llama, owned, plan_of, setting_of, up
from trainledger.account.ledger import entry
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.plans.setting import Setting

BUCKET = 500_000_000
"""reduce_bucket_size, elements. [runtime/zero/config.py]"""

MODELS = {"70b": llama("70b"), "8b": llama("8b"), "small": dense(), "prime": dense(hidden=24, heads=3, kv_heads=3)}
MANY = pytest.mark.parametrize("name", MODELS)


def deepspeed(name: str, **scenario: object) -> Setting:
    return setting_of(MODELS[name], engine="deepspeed", **scenario)


@MANY
@pytest.mark.parametrize("shards", [1, 3, 8, 64])
def test_stage_0_in_16_bits_keeps_a_flat_clone_and_a_master(name: str, shards: int) -> None:
    """Flat clone 2, gradient 2, master 4, moments 8; the step adds fp32 casts and their concatenation, 4 each."""
    total = MODELS[name].total_params
    found = held(deepspeed(name), dp_shard=shards, zero_stage=0)
    assert found.at("rest") == 14 * total
    assert found.at("step") == 14 * total + 2 * total + 8 * total
    assert found.at("backward") == 16 * total + 2 * min(total, BUCKET)
    assert found.at("rest") == held(deepspeed(name, precision="fp16"), dp_shard=shards, zero_stage=0).at("rest")


@MANY
def test_stage_0_in_fp32_is_the_torch_optimizer(name: str) -> None:
    total = MODELS[name].total_params
    found = held(deepspeed(name, precision="fp32"), dp_shard=8, zero_stage=0)
    assert found.at("step") == 16 * total
    assert found.at("backward") == 16 * total + 4 * min(total, BUCKET)


@MANY
@pytest.mark.parametrize("shards", [1, 3, 8])
def test_stage_0_in_bf16_with_a_pipeline_shards_the_optimizer_all_the_same(name: str, shards: int) -> None:
    model = MODELS[name]
    for stage, layers in enumerate((range(model.num_layers // 2), range(model.num_layers // 2, model.num_layers))):
        total = elements(owned(model, layers=layers, ends=(stage == 0, stage == 1)))
        padded = up(total, 2 * shards)
        found = held(deepspeed(name), stage, dp_shard=shards, pp=2, zero_stage=0)
        assert found.of("weights") == 2 * padded
        assert found.bytes["gradients", "rest"] == 2 * padded
        assert found.of("gradients") == 2 * padded + 2 * total
        assert found.of("optimizer") == 12 * padded // shards
        assert found.bytes["buffers", "step"] == 4 * padded // shards


@MANY
@pytest.mark.parametrize("shards", [1, 3, 8, 64])
def test_stage_1_with_fp32_accumulation_keeps_a_whole_fp32_buffer(name: str, shards: int) -> None:
    """2 + 2 (grad) + 4 (buffer that is never sharded) + 12 / N; the all-reduce copies the buffer to bf16."""
    total = MODELS[name].total_params
    padded = up(total, 2 * shards)
    found = held(deepspeed(name, grad_dtype="fp32"), dp_shard=shards, zero_stage=1)
    assert found.at("rest") == (2 + 4) * padded + 12 * padded // shards
    assert found.at("backward") == found.at("rest") + 2 * total + 2 * padded
    assert found.at("step") == found.at("rest") + 2 * total


@MANY
@pytest.mark.parametrize("shards", [1, 3, 8, 64])
def test_stages_1_and_2_keep_one_flat_buffer_padded_to_twice_the_ranks(name: str, shards: int) -> None:
    total = MODELS[name].total_params
    padded = up(total, 2 * shards)
    share = padded // shards
    for stage in (1, 2):
        found = held(deepspeed(name), dp_shard=shards, zero_stage=stage)
        assert found.at("rest") == 2 * padded + 12 * share
        assert found.at("step") == found.at("rest") + 2 * share + (2 + 4) * share
        kept = 2 * total if stage == 1 else 2 * share
        assert found.at("backward") == found.at("rest") + kept + 2 * BUCKET + 2 * min(total, BUCKET)


@MANY
def test_stages_1_and_2_in_fp32_need_no_cast_in_the_step(name: str) -> None:
    padded = up(MODELS[name].total_params, 16)
    for stage in (1, 2):
        found = held(deepspeed(name, precision="fp32"), dp_shard=8, zero_stage=stage)
        assert found.at("step") == 4 * padded + 12 * padded // 8 + (4 + 4) * padded // 8


def test_what_later_micro_batches_add() -> None:
    """Stage 1 and 0 keep whole gradients through the next forward; stage 2 its partition, twice while one runs."""
    model = MODELS["8b"]
    share = up(model.total_params, 16) // 8
    two = {stage: held(deepspeed("8b"), dp_shard=8, zero_stage=stage, num_microbatches=2) for stage in range(4)}
    one = {stage: held(deepspeed("8b"), dp_shard=8, zero_stage=stage) for stage in range(4)}
    assert two[0].at("loss") - one[0].at("loss") == 2 * model.total_params
    assert two[1].at("loss") - one[1].at("loss") == 2 * model.total_params
    assert two[2].at("loss") - one[2].at("loss") == 2 * share
    assert two[2].at("backward") - one[2].at("backward") == 2 * share
    assert two[3].at("loss") == one[3].at("loss")


@MANY
@pytest.mark.parametrize("shards", [1, 3, 8, 64])
def test_stage_3_pads_parameter_by_parameter(name: str, shards: int) -> None:
    """Shards of ceil(numel / N); what has at most 100,000 elements also stays gathered; a 1 GB bucket all the time."""
    tensors = owned(MODELS[name])
    stored = sum(-(-t.numel // shards) * t.times for t in tensors)
    persistent = sum(t.numel * t.times for t in tensors if t.numel <= 100_000)
    found = held(deepspeed(name), dp_shard=shards, zero_stage=3)
    assert found.of("weights") == 2 * stored + 2 * persistent
    assert found.of("gradients") == 2 * stored
    assert found.of("optimizer") == 12 * stored
    assert found.bytes["buffers", "rest"] == 2 * BUCKET
    capped = min(stored, 1_000_000_000)
    assert found.bytes["buffers", "step"] == 2 * BUCKET + (2 + 4) * capped


@pytest.mark.parametrize(("zero", "micro_batches"), [(1, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("size", [1_000_000, 2 * BUCKET])
def test_a_copy_of_a_bucket_is_as_large_as_buckets_are_set(zero: int, micro_batches: int, size: int) -> None:
    """Stages 1 and 2 hand reduce_bucket_size on as numel_per_bucket; stage 3 joins what its bucket has."""
    model, plan = MODELS["8b"], {"dp_shard": 8, "zero_stage": zero, "num_microbatches": micro_batches}
    usual, other = (held(deepspeed("8b", reduce_bucket=size), **plan) for size in (0, size))
    more = other.bytes["buffers", "backward"] - usual.bytes["buffers", "backward"]
    assert more == 2 * 2 * (min(size, model.total_params) - BUCKET)


@pytest.mark.parametrize(("zero", "second"), [(0, 0), (1, 1), (2, 1), (3, 0)])
def test_stages_1_and_2_fill_a_second_bucket_where_communication_overlaps(zero: int, second: int) -> None:
    plan = {"dp_shard": 8, "zero_stage": zero}
    off, on = (held(deepspeed("8b", overlap_comm=switch), **plan) for switch in ("off", "on"))
    assert on.bytes["buffers", "backward"] - off.bytes["buffers", "backward"] == second * 2 * BUCKET
    assert on.bytes["buffers", "rest"] == off.bytes["buffers", "rest"]


def test_stage_3_accumulating_in_fp32_keeps_4_over_n_and_copies_once_in_the_step() -> None:
    model = MODELS["8b"]
    stored = sum(-(-t.numel // 64) * t.times for t in owned(model))
    found = held(deepspeed("8b", grad_dtype="fp32"), dp_shard=64, zero_stage=3)
    assert found.of("gradients") == 4 * stored
    assert found.bytes["buffers", "rest"] == 2 * BUCKET
    assert found.bytes["buffers", "step"] == 2 * BUCKET + 4 * stored


def test_stage_2_accumulates_in_the_dtype_of_the_weights_whatever_is_asked() -> None:
    """grads_in_partition is allocated in the model's dtype. [stage_1_and_2.py 1679]"""
    plain, asked = (held(deepspeed("8b", grad_dtype=dtype), dp_shard=8, zero_stage=2) for dtype in ("", "fp32"))
    assert plain == asked


@pytest.mark.parametrize(("stage", "per_param"), [(1, 18), (2, 18), (3, 18)])
def test_offloading_the_optimizer_moves_18_bytes_over_n_to_the_host(stage: int, per_param: int) -> None:
    """Master, fp32 gradient, moments, and the 16-bit partition (stages 1, 2) or flat gradients (stage 3)."""
    model = MODELS["8b"]
    found = held(deepspeed("8b", offload=("optimizer",)), dp_shard=8, zero_stage=stage)
    largest = max(t.numel for t in owned(model))
    if stage < 3:
        assert found.host == per_param * up(model.total_params, 16) // 8 + 2 * largest
        assert found.bytes["buffers", "rest"] == 2 * largest
    else:
        assert found.host == per_param * sum(-(-t.numel // 8) * t.times for t in owned(model))
    assert found.of("optimizer") == 0


def test_offloading_parameters_too_leaves_what_stays_gathered() -> None:
    model = MODELS["8b"]
    found = held(deepspeed("8b", offload=("optimizer", "parameters")), dp_shard=8, zero_stage=3)
    stored = sum(-(-t.numel // 8) * t.times for t in owned(model))
    assert found.host == 20 * stored
    assert found.of("weights") == 2 * sum(t.numel * t.times for t in owned(model) if t.numel <= 100_000)


def test_frozen_weights_are_outside_the_flat_buffer() -> None:
    """Only parameters that train are flattened, so only they are padded. [stage_1_and_2.py 379-386]"""
    model = MODELS["prime"]
    setting = setting_of(model, Workload(lora_rank=3, lora_targets=("all-linear",)), engine="deepspeed")
    lines = entry(Inventory(setting), plan_of(dp_shard=64, zero_stage=1)).lines
    frozen = sum(line.amount for line in lines if "frozen" in line.id)
    flat = next(line.amount for line in lines if line.id == "held/weights/flat weights")
    adapters = sum(3 * (t.rows + t.rest) * t.times for t in owned(model) if t.tensor.linear and t.tensor.role != "head")
    assert model.total_params % 128 != 0
    assert frozen == 2 * model.total_params
    assert flat == 2 * up(adapters, 128)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_4_bit_weights_are_never_partitioned(stage: int) -> None:
    """They stay whole under ZeRO-3 too: 4 bits, an 8-bit scale per 64, an fp32 scale per 256 of those."""
    workload = Workload(lora_rank=8, lora_targets=("all-linear",), qlora=True)
    inventory = Inventory(setting_of(MODELS["8b"], workload, engine="deepspeed"))
    lines = entry(inventory, plan_of(dp_shard=64, zero_stage=stage)).lines
    linear = sum(t.numel * t.times for t in owned(MODELS["8b"]) if t.tensor.linear and t.tensor.role != "head")
    amount = sum(line.amount for line in lines if "4-bit" in line.id)
    assert amount == linear // 2 + linear // 64 + 4 * linear // (64 * 256)
