"""Data-parallel traffic of one optimizer step: the paper's table, and what engines do instead."""

from __future__ import annotations

import pytest

from strategies import (
    Owned,
    calls_of,
    dense,
    elements,
    latent,
    llama,
    one_call,
    owned,
    routed,
    setting_of,
    tiny,
    up,
)
from trainledger.facts.model import Model
from trainledger.facts.workload import Workload
from trainledger.plans.partition import megatron_layout

BILLIONS = llama("70b")
SMALL = dense(vocab=256)


def on_the_wire(engine: str, **columns: object) -> float:
    """Ring bytes that a rank sends over those of 2 bytes for every parameter."""
    return sum(c.wire for c in calls_of(setting_of(BILLIONS, engine=engine), **columns)) / (2 * BILLIONS.total_params)


@pytest.mark.parametrize("shards", [2, 8, 64])
@pytest.mark.parametrize("batches", [1, 2, 8])
@pytest.mark.parametrize(("zero_stage", "once", "per_batch"), [(0, 2, 0), (1, 2, 0), (2, 1, 1), (3, 0, 3)])
def test_the_papers_table(shards: int, batches: int, zero_stage: int, once: int, per_batch: int) -> None:
    """2(N-1)/N at stages 0 and 1; a gather and a scatter per micro-batch; 3(N-1)/N per micro-batch. [zero-paper: 7]"""
    found = on_the_wire("paper", dp_shard=shards, zero_stage=zero_stage, num_microbatches=batches)
    assert found == pytest.approx((once + per_batch * batches) * (shards - 1) / shards, rel=1e-9)


@pytest.mark.parametrize("zero_stage", [1, 2])
@pytest.mark.parametrize("shards", [2, 8, 64])
def test_deepspeed_moves_half_as_much_again_as_ddp(zero_stage: int, shards: int) -> None:
    """All-reduce and then all-gather: 3(N-1)/N at both stages, where stage 0 takes 2(N-1)/N."""
    found = on_the_wire("deepspeed", dp_shard=shards, zero_stage=zero_stage)
    assert found == pytest.approx(3 * (shards - 1) / shards, rel=1e-9)
    assert on_the_wire("deepspeed", dp_shard=shards, zero_stage=0) == pytest.approx(2 * (shards - 1) / shards)


def test_deepspeed_stage_2_reduces_every_micro_batch_and_stage_1_at_the_boundary() -> None:
    for zero_stage, reductions in ((0, 1), (1, 1), (2, 4)):
        calls = calls_of(setting_of(SMALL, engine="deepspeed"), dp_shard=8, zero_stage=zero_stage, num_microbatches=4)
        reduced = one_call(calls, "all_reduce", "dp")
        assert reduced.in_bytes == reductions * 2 * SMALL.total_params
        assert reduced.count == reductions
    buckets = one_call(calls_of(setting_of(BILLIONS, engine="deepspeed"), dp_shard=8, zero_stage=1), "all_reduce", "dp")
    assert buckets.count == -(-BILLIONS.total_params // 500_000_000)


def test_deepspeed_reduces_in_16_bits_whatever_it_accumulates_in_but_under_sequence_parallelism() -> None:
    for zero_stage in (1, 3):
        plain, wide = (
            calls_of(setting_of(SMALL, engine="deepspeed", grad_dtype=dtype), dp_shard=8, zero_stage=zero_stage)
            for dtype in ("", "fp32")
        )
        assert plain == wide
    spread = calls_of(setting_of(SMALL, engine="deepspeed"), dp_shard=4, cp=2, zero_stage=2)
    assert one_call(spread, "all_reduce", "dp").dtype == "fp32"
    assert one_call(spread, "all_reduce", "dp").in_bytes == 4 * SMALL.total_params


def test_deepspeed_stage_3_gathers_small_parameters_once_per_step() -> None:
    tensors = owned(BILLIONS)
    shards, batches = 64, 3
    kept, moving = ([t for t in tensors if (t.numel <= 100_000) is small] for small in (True, False))
    calls = calls_of(setting_of(BILLIONS, engine="deepspeed"), dp_shard=shards, zero_stage=3, num_microbatches=batches)
    padded = {id(group): sum(up(t.numel, shards) * t.times for t in group) for group in (kept, moving, tensors)}
    gathered = one_call(calls, "all_gather", "dp_shard", "weights")
    assert gathered.out_bytes == 2 * batches * 2 * padded[id(moving)]
    assert one_call(calls, "all_gather", "dp_shard", "persistent weights").out_bytes == 2 * padded[id(kept)]
    assert one_call(calls, "reduce_scatter", "dp_shard").in_bytes == batches * 2 * padded[id(tensors)]


def test_a_deepspeed_pipeline_in_bf16_gathers_at_stage_0() -> None:
    calls = calls_of(setting_of(SMALL, engine="deepspeed"), 0, pp=2, dp_shard=8, zero_stage=0)
    first = elements(owned(SMALL, layers=range(2), ends=(True, False)))
    assert one_call(calls, "all_gather", "dp_shard").out_bytes == 2 * up(first, 16)


@pytest.mark.parametrize(
    ("size", "gathered", "reduced"),
    [("8b", 30_019_690_496, 32_121_044_992), ("70b", 278_012_116_992, 282_214_825_984)],
)
def test_fsdp2_moves_what_a_dry_run_of_world_64_counted(size: str, gathered: int, reduced: int) -> None:
    """The dry run left embedding, norm and head to the root, which is gathered once; here they are gathered twice.

    torchtitan keeps norm and head alone.
    """
    model = llama(size)
    root = 2 * (2 * model.vocab_size + 1) * model.hidden_size
    final = 2 * (model.vocab_size + 1) * model.hidden_size
    for engine, once in (("pytorch", 0), ("torchtitan", final)):
        calls = calls_of(setting_of(model, engine=engine), dp_shard=64, zero_stage=3)
        assert one_call(calls, "all_gather", "dp_shard").out_bytes + once == gathered + root
        assert one_call(calls, "reduce_scatter", "dp_shard").in_bytes == reduced


def test_what_was_counted_of_the_small_decoder_on_4_cpu_ranks() -> None:
    """fp32, N = 3,478,016 B: DDP reduces N in 2 calls; FSDP2 gathers 2N, scatters N; 2 x 2 adds N/2 over replicas."""
    whole = 3_478_016
    setting = setting_of(tiny(), engine="pytorch", precision="fp32")
    reduced = one_call(calls_of(setting, dp_shard=4, zero_stage=0), "all_reduce", "dp")
    assert (reduced.count, reduced.in_bytes) == (2, whole)
    sharded = calls_of(setting, dp_shard=4, zero_stage=3)
    assert one_call(sharded, "all_gather", "dp_shard").out_bytes == 2 * whole
    assert one_call(sharded, "reduce_scatter", "dp_shard").in_bytes == whole
    kept = calls_of(setting, dp_shard=4, zero_stage=2)
    assert one_call(kept, "all_gather", "dp_shard").out_bytes == whole
    hybrid = calls_of(setting, dp_shard=2, dp_replicate=2, zero_stage=3)
    assert one_call(hybrid, "all_reduce", "dp_replicate").in_bytes == whole // 2


@pytest.mark.parametrize(("zero_stage", "gathers", "scatters"), [(3, 2 * 2, 2), (2, 1, 2), (1, 1, 1)])
def test_the_fsdp2_knobs_on_2_micro_batches(zero_stage: int, gathers: int, scatters: int) -> None:
    """Weights gathered twice per micro-batch, or once per step; gradients scattered each time, or once."""
    setting = setting_of(tiny(), engine="pytorch", precision="fp32")
    calls = calls_of(setting, dp_shard=4, zero_stage=zero_stage, num_microbatches=2)
    assert one_call(calls, "all_gather", "dp_shard").out_bytes == gathers * 3_478_016
    assert one_call(calls, "reduce_scatter", "dp_shard").in_bytes == scatters * 3_478_016


def test_clipping_sums_one_number_over_the_whole_job() -> None:
    setting = setting_of(dense(), engine="pytorch")
    for columns, ranks in (({"dp_shard": 2, "pp": 2, "tp": 2, "zero_stage": 3}, 8), ({"dp_shard": 4}, 4)):
        norm = one_call(calls_of(setting, **columns), "all_reduce", "world")
        assert (norm.dtype, norm.ranks, norm.count, norm.in_bytes) == ("fp32", ranks, 1, 4)
    assert not calls_of(setting, zero_stage=3)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_a_tied_output_layer_makes_one_unit_of_both_ends(zero_stage: int) -> None:
    """In a pipeline each end is a unit: the last stage's copy of the embedding lies in what follows the last block."""
    setting = setting_of(dense(tied=True, vocab=256), engine="pytorch")
    passes = 2 if zero_stage == 3 else 1
    whole = calls_of(setting, dp_shard=4, zero_stage=zero_stage)
    assert one_call(whole, "all_gather", "dp_shard").count == passes * (4 + 1)
    assert one_call(whole, "reduce_scatter", "dp_shard").count == 4 + 1
    for stage in (0, 1):
        piped = calls_of(setting, stage, pp=2, dp_shard=4, zero_stage=zero_stage, num_microbatches=3)
        assert one_call(piped, "all_gather", "dp_shard").count == 2 + 1
        assert one_call(piped, "reduce_scatter", "dp_shard").count == 2 + 1


@pytest.mark.parametrize("engine", ["pytorch", "torchtitan"])
def test_experts_that_have_no_ranks_of_their_own_travel_with_their_block(engine: str) -> None:
    model = routed()
    setting = setting_of(model, engine=engine)
    together = calls_of(setting, dp_shard=8, zero_stage=3)
    assert {call.group for call in together} <= {"dp_shard", "world"}
    scattered = one_call(together, "reduce_scatter", "dp_shard")
    assert (scattered.count, scattered.in_bytes) == (
        4 + 2,
        4 * sum(up(t.rows, 8) * t.rest * t.times for t in owned(model)),
    )
    apart = calls_of(setting, dp_shard=8, ep=2, etp=1, zero_stage=3)
    assert one_call(apart, "reduce_scatter", "dp_shard").count == 4 + 2
    assert one_call(apart, "reduce_scatter", "expert_dp_shard").count == 4


def test_replicas_that_ddp_does_not_wrap_are_reduced_unit_by_unit_once() -> None:
    """Whatever the micro-batches; experts over ranks of their own."""
    dense_calls = calls_of(setting_of(dense(), engine="pytorch"), dp_shard=4, zero_stage=0, num_microbatches=3)
    reduced = one_call(dense_calls, "all_reduce", "dp")
    assert (reduced.dtype, reduced.count, reduced.in_bytes) == ("fp32", 4 + 2, 4 * dense().total_params)
    experts = calls_of(setting_of(routed(), engine="pytorch", precision="fp32"), dp_shard=4, ep=2, etp=1, zero_stage=0)
    own = owned(routed(), ep=2, etp=1)
    assert one_call(experts, "all_reduce", "expert_dp").in_bytes == 4 * elements(own, expert=True)
    assert one_call(experts, "all_reduce", "dp").in_bytes == 4 * elements(own, expert=False)


def test_experts_that_ddp_wraps_are_in_its_buckets_alone() -> None:
    """Without ranks of their own there is no other group to which calls could go, not even of no bytes."""
    calls = calls_of(setting_of(routed(), engine="pytorch", precision="fp32"), dp_shard=4, zero_stage=0)
    reduced = [call for call in calls if call.op == "all_reduce" and call.group != "world"]
    assert [(call.group, call.in_bytes) for call in reduced] == [("dp", 4 * routed().total_params)]


def test_fsdp2_padding_travels() -> None:
    model = dense(hidden=24, heads=3, kv_heads=1)
    padded = sum(up(t.rows, 7) * t.rest * t.times for t in owned(model))
    calls = calls_of(setting_of(model, engine="pytorch"), dp_shard=7, zero_stage=3)
    assert one_call(calls, "all_gather", "dp_shard").out_bytes == 2 * 2 * padded
    assert one_call(calls, "reduce_scatter", "dp_shard").in_bytes == 4 * padded


def test_adapters_alone_are_reduced_and_everything_is_gathered() -> None:
    workload = Workload(lora_rank=8, lora_targets=("q_proj", "v_proj"))
    model = llama("8b")
    adapters = 32 * 8 * ((4096 + 4096) + (4096 + 1024))
    calls = calls_of(setting_of(model, workload, engine="pytorch"), dp_shard=8, zero_stage=3)
    scattered = one_call(calls, "reduce_scatter", "dp_shard")
    assert (scattered.count, scattered.in_bytes) == (32, 4 * adapters)
    gathered = one_call(calls, "all_gather", "dp_shard")
    assert (gathered.count, gathered.out_bytes) == (2 * 34, 2 * 2 * (model.total_params + adapters))


def test_an_fp8_gather_is_half_of_a_16_bit_one_for_matrices() -> None:
    tensors = owned(BILLIONS)
    matrices = elements([t for t in tensors if t.tensor.linear and t.tensor.role != "head"])
    calls = calls_of(setting_of(BILLIONS, engine="pytorch", precision="fp8-tensorwise"), dp_shard=64, zero_stage=3)
    blocks = elements(owned(BILLIONS, ends=(False, False)))
    bytewise, plain = (call for call in calls if call.op == "all_gather")
    assert (bytewise.dtype, plain.dtype) == ("uint8", "bf16")
    assert bytewise.out_bytes == 2 * (matrices + 2 * (blocks - matrices))
    assert plain.out_bytes == 2 * 2 * (BILLIONS.total_params - blocks)
    # the embedding, and what follows the last block, have nothing in FP8
    assert (bytewise.count, plain.count) == (2 * BILLIONS.num_layers, 2 * 2)
    scales = one_call(calls, "all_reduce", "dp_shard")
    assert (scales.count, scales.in_bytes) == (1, 4 * 7 * BILLIONS.num_layers)


def test_experts_that_are_stacked_are_gathered_in_16_bits() -> None:
    model = routed()
    calls = calls_of(setting_of(model, engine="pytorch", precision="fp8-tensorwise"), dp_shard=2, zero_stage=3)
    matrices = sum(
        len(block.layers) * tensor.numel
        for block in model.blocks
        for tensor in block.tensors
        if tensor.projection and tensor.role != "expert"
    )
    total = sum(call.out_bytes for call in calls if call.op == "all_gather")
    # both tables have 211 rows, one of which is padding's
    padding = 2 * 2 * 2 * model.hidden_size
    assert total == 2 * (2 * model.total_params - matrices) + padding


def test_under_fp16_all_ranks_agree_on_infinities_once_a_step() -> None:
    calls = calls_of(setting_of(dense(), engine="pytorch", precision="fp16"), dp_shard=2, tp=2, zero_stage=1)
    asked = one_call(calls, "all_reduce", "world", "infinities")
    assert (asked.dtype, asked.ranks, asked.count, asked.in_bytes) == ("fp32", 4, 1, 4)


def test_torchtitan_defers_to_the_end_of_a_pipeline_and_reduces_replicas_unit_by_unit() -> None:
    setting = setting_of(llama("8b"), engine="torchtitan")
    piped = calls_of(setting, 0, pp=2, dp_shard=8, zero_stage=3, num_microbatches=4)
    whole = elements(owned(llama("8b"), layers=range(16), ends=(True, False)))
    assert one_call(piped, "all_gather", "dp_shard").key == ("all_gather", "dp_shard", 17)
    assert one_call(piped, "all_gather", "dp_shard").out_bytes == 2 * whole
    assert one_call(piped, "reduce_scatter", "dp_shard").in_bytes == 4 * whole
    replicas = one_call(calls_of(setting, dp_shard=8, zero_stage=0, num_microbatches=4), "all_reduce", "dp")
    assert (replicas.count, replicas.in_bytes) == (4 * 34, 4 * 4 * llama("8b").total_params)


def test_torchtitan_keeps_a_tied_embedding_gathered_with_the_head() -> None:
    model = dense(tied=True, vocab=256)
    block = elements(owned(model, layers=range(4), ends=(False, False)))
    gathered = one_call(
        calls_of(setting_of(model, engine="torchtitan"), dp_shard=8, zero_stage=3), "all_gather", "dp_shard"
    )
    assert gathered.out_bytes == 2 * (2 * block + model.total_params - block)


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_megatron_fsdp_reduces_bf16_units_and_replicas_once(zero_stage: int) -> None:
    calls = calls_of(
        setting_of(llama("8b"), engine="megatron"),
        dp_shard=8,
        dp_replicate=2,
        zero_stage=zero_stage,
        num_microbatches=3,
    )
    scattered = one_call(calls, "reduce_scatter", "dp_shard")
    assert scattered.dtype == "bf16"
    assert one_call(calls, "all_reduce", "dp_replicate").in_bytes == scattered.in_bytes // 3 // 8
    gathers = 2 * 3 if zero_stage == 3 else 1
    assert one_call(calls, "all_gather", "dp_shard").out_bytes == gathers * scattered.in_bytes // 3


@pytest.mark.parametrize("dtype", ["", "bf16"])
def test_megatron_scatters_its_gradient_buffer_and_gathers_its_parameters_once(dtype: str) -> None:
    model, shards = llama("8b"), 24
    sizes = [t.numel for t in owned(model, vocab_multiple=128) for _ in range(t.times)]
    buffer = megatron_layout(sizes, shards)[0][0][1]
    calls = calls_of(
        setting_of(model, engine="megatron", grad_dtype=dtype), dp_shard=12, dp_replicate=2, cp=2, zero_stage=1,
        num_microbatches=4,
    )  # fmt: skip
    width = 2 if dtype else 4
    assert one_call(calls, "reduce_scatter", "dp_shard").in_bytes == width * buffer
    assert one_call(calls, "all_reduce", "dp_replicate").in_bytes == width * buffer // shards
    assert one_call(calls, "all_gather", "dp_shard").out_bytes == 2 * buffer
    assert {one_call(calls, op, "dp_shard").count for op in ("reduce_scatter", "all_gather")} == {1}


def test_each_virtual_stage_of_megatron_reduces_its_own_buffer() -> None:
    setting = setting_of(SMALL, engine="megatron", schedule="interleaved")
    calls = calls_of(setting, 0, pp=2, vpp=2, dp_shard=4, zero_stage=1, num_microbatches=2)
    assert one_call(calls, "reduce_scatter", "dp_shard").count == 2


@pytest.mark.parametrize("model", [routed(), latent()], ids=["mixtral", "deepseek"])
def test_experts_are_reduced_over_the_ranks_that_share_them(model: Model) -> None:
    """tp x cp x dp / (etp x ep) ranks; with ep 1 and etp as tp they travel in the dense buffer."""
    setting = setting_of(model, engine="megatron")
    apart = calls_of(setting, tp=2, etp=1, ep=2, sp=1, dp_shard=8, zero_stage=1)
    assert (
        one_call(apart, "reduce_scatter", "dp_shard").ranks,
        one_call(apart, "reduce_scatter", "expert_dp_shard").ranks,
    ) == (8, 8)
    experts: list[Owned] = [t for t in owned(model, tp=2, etp=1, ep=2) if t.expert]
    sizes = [t.numel for t in experts for _ in range(t.times)]
    assert one_call(apart, "reduce_scatter", "expert_dp_shard").in_bytes == 4 * megatron_layout(sizes, 8)[0][0][1]
    together = calls_of(setting, tp=2, etp=2, ep=1, sp=1, dp_shard=8, zero_stage=1)
    assert not [call for call in together if call.group.startswith("expert_dp")]


@pytest.mark.parametrize("engine", ["paper", "pytorch", "torchtitan", "megatron"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_no_two_calls_of_a_rank_bear_one_name(engine: str, zero_stage: int) -> None:
    """Shards of experts are summed over replicas too, and are not those of dense tensors."""
    setting = setting_of(routed(), engine=engine)
    if zero_stage not in setting.profile.zero_stages:
        return
    columns = {"dp_replicate": 2, "dp_shard": 4, "ep": 2, "zero_stage": zero_stage, "num_microbatches": 2}
    names = [(call.op, call.group, call.what) for call in calls_of(setting, **columns) if call.count]
    assert len(names) == len(set(names))
