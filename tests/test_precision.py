"""Recipes: loss scaling on which all ranks agree, and FP8 that is there, is counted and notices its range."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from parallel_runs import SEQ
from precision_runs import (
    SCALE,
    Overflow,
    Saturated,
    at_minimum,
    llama_spec,
    logits,
    losses,
    overflow,
    saturated,
    scaling_spec,
)
from strategies import plan_of, setting_of
from trainledger.account.flop import step_flop
from trainledger.errors import BadInput, Refused
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.plans.ranks import world_size
from trainledger.runtime.launch.fork import run_forked
from trainledger.runtime.model import build_decoder, init_weights
from trainledger.runtime.precision.fp8 import Fp8
from trainledger.runtime.precision.share import fp8_layers, share_of
from trainledger.runtime.spec import RunSpec
from trainledger.service.prove import Request
from trainledger.service.prove import run as run_proof

CPU = torch.device("cpu")
LAYOUTS: dict[str, dict[str, int]] = {
    "dp": {"dp_shard": 2, "zero_stage": 3},
    "replicas": {"dp_replicate": 2},
    "tp": {"tp": 2},
    "pp": {"pp": 2, "num_microbatches": 2},
}
"""Two ranks each: an infinity is planted on the second, in a gradient of whatever mesh that is."""
SHARDED = {"dp_shard": 2, "zero_stage": 3}
LAYER, OPERAND = "model.layers.1.mlp.up_proj", "input"


@pytest.fixture(scope="module")
def overflows() -> dict[str, list[Overflow]]:
    """What both ranks see, by layout."""
    specs = [scaling_spec(plan) for plan in LAYOUTS.values()]
    return dict(zip(LAYOUTS, map(list, zip(*run_forked(2, overflow, specs, 1), strict=True)), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_infinity_on_one_rank_is_skipped_by_all_and_training_goes_on(
    layout: str, overflows: dict[str, list[Overflow]]
) -> None:
    for seen in overflows[layout]:
        assert [step.skipped for step in seen.steps] == [False, True, False, False]
        assert [step.scale for step in seen.steps] == [SCALE, SCALE, SCALE / 2, SCALE / 2]
        assert seen.kept
        assert seen.moved


def test_the_loss_that_is_said_is_not_scaled(overflows: dict[str, list[Overflow]]) -> None:
    said = [step.loss for layout in LAYOUTS for seen in overflows[layout] for step in seen.steps]
    assert all(loss is None or 3 < loss < 7 for loss in said)
    assert [step.loss is None for step in overflows["pp"][0].steps] == [True] * 4


def test_a_scale_ends_at_its_minimum_with_the_layers_whose_gradients_are_not_finite() -> None:
    spec = scaling_spec(SHARDED, initial=4.0, minimum=2.0)
    told = run_forked(2, at_minimum, spec, 1)
    assert told[0] == told[1]
    message, scale = told[0]
    assert scale == 2.0
    assert "a loss scale of 2, the smallest that is allowed: those of lm_head.weight;" in message
    assert "--precision bf16" in message


@pytest.fixture(scope="module")
def seen() -> list[Saturated]:
    """What both ranks see of a scale that is too large on the second, under sharded FP8 weights."""
    spec = llama_spec({**SHARDED, "num_microbatches": 2}, precision="fp8-tensorwise")
    return run_forked(2, saturated, spec, 1, LAYER, OPERAND)


def test_saturation_on_one_rank_is_the_same_count_on_all(seen: list[Saturated]) -> None:
    assert seen[0].before == seen[1].before
    assert seen[0].with_fault == seen[1].with_fault
    assert not any(one.saturated for one in seen[0].before)
    found = [one for one in seen[0].with_fault if one.saturated]
    assert [(one.layer, one.operand) for one in found] == [(LAYER, OPERAND)]
    # one of two ranks casts twice each micro-batch, and nearly all that it casts is too large
    assert 0.3 < found[0].saturated_share < 0.5
    assert found[0].elements == 2 * 2 * 2 * SEQ * 64


def test_a_layer_that_fell_back_casts_no_more_and_is_gathered_in_16_bits(seen: list[Saturated]) -> None:
    layers = {one.layer for one in seen[0].before}
    assert {one.layer for one in seen[0].after} == layers - {LAYER}
    first, last = ({(call.op, call.dtype): call for call in calls} for calls in seen[0].calls)
    # twice a micro-batch, for the forward and the backward
    extra = 2 * 2 * 64 * 96
    gathers = [sum(call.out_bytes for (op, _), call in calls.items() if op == "all_gather") for calls in (first, last)]
    assert gathers[1] - gathers[0] == extra
    assert all(one.state == {"fallen": [LAYER]} and one.loss is not None and one.loss < 7 for one in seen)


def test_weights_of_fp8_layers_are_gathered_in_one_byte_each(seen: list[Saturated]) -> None:
    spec = llama_spec({**SHARDED, "num_microbatches": 2}, precision="fp8-tensorwise")
    matrices = sum(
        tensor.numel * len(block.layers) for block in spec.model.blocks for tensor in block.tensors if tensor.projection
    )
    norms = sum(
        tensor.numel * len(block.layers)
        for block in spec.model.blocks
        for tensor in block.tensors
        if tensor.role == "norm"
    )
    (call,) = (call for call in seen[0].calls[0] if (call.op, call.dtype) == ("all_gather", "uint8"))
    # forward and backward of two micro-batches; norms are in the same unit, in 16 bits
    assert call.out_bytes == 4 * (matrices + 2 * norms)
    (scales,) = (call for call in seen[0].calls[0] if (call.op, call.group) == ("all_reduce", "dp_shard"))
    assert (scales.count, scales.in_bytes) == (1, 4 * len(fp8_layers(spec.model)))


def test_as_many_products_run_in_fp8_as_the_share_says(seen: list[Saturated]) -> None:
    spec = llama_spec({**SHARDED, "num_microbatches": 2}, precision="fp8-tensorwise")
    assert sum(one.gemms for one in seen) == share_of(spec).fp8_gemms
    assert share_of(spec).of_linear > 0.8
    assert share_of(spec, fallen=[LAYER]).fp8_gemms == share_of(spec).fp8_gemms * 13 // 14


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("plan", [{}, {"dp_shard": 2, "tp": 2, "mbs": 2, "num_microbatches": 3}])
def test_a_share_is_of_the_arithmetic_that_the_ledger_has(plan: dict[str, int], recompute: str) -> None:
    spec = llama_spec(plan, precision="fp8-rowwise", recompute=recompute, early_stop=False)
    setting = setting_of(spec.model, Workload(seq=SEQ), engine="pytorch", precision="bf16", recompute=recompute)
    found = step_flop(Inventory(setting), plan_of(**{**spec.plan, "etp": spec.plan["tp"]}))
    # of one rank, and all ranks do the same; a checkpoint of the ledger's stops early, by one matrix of each block
    total = sum(int(amount[0, 0]) for amount in found.values()) * world_size(spec.plan)
    spared = 2 * 2 * 64 * 96 * SEQ * sequences_of(spec) if recompute == "full" else 0
    assert share_of(spec).flop == total + spared


def sequences_of(spec: RunSpec) -> int:
    return spec.plan["mbs"] * spec.plan["num_microbatches"] * spec.plan["dp_shard"]


def converted(precision: str) -> tuple[Fp8, nn.Module]:
    """A decoder in bf16 with its FP8 layers, on this process alone."""
    spec = llama_spec({}, precision=precision)
    decoder = build_decoder(spec.model, spec.config)
    init_weights(decoder, 0)
    fp8 = Fp8(spec, CPU)
    fp8.convert(decoder.to(torch.bfloat16))
    return fp8, decoder


def test_every_matrix_of_the_blocks_is_converted_and_the_output_layer_is_not() -> None:
    fp8, decoder = converted("fp8-rowwise")
    kinds = {name: type(module).__name__ for name, module in decoder.named_modules() if isinstance(module, nn.Linear)}
    assert {name for name, kind in kinds.items() if kind == "Float8Linear"} == set(fp8.layers)
    assert set(kinds) - set(fp8.layers) == {"lm_head"}
    assert len(fp8.layers) == 14


def test_under_fp8_forward_gradients_are_those_of_the_16_bit_products() -> None:
    fp8, _ = converted("fp8-forward")
    layer = fp8.layers["model.layers.0.mlp.gate_proj"]
    assert isinstance(layer, nn.Linear)
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(32, 64, generator=generator, dtype=torch.bfloat16).requires_grad_()
    behind = torch.randn(32, 96, generator=generator, dtype=torch.bfloat16)
    out = layer(given)
    out.backward(behind)
    plain = given.detach() @ layer.weight.detach().t()
    off = float((out.detach() - plain).float().norm() / plain.float().norm())
    assert 3e-3 < off < 1e-1
    assert given.grad is not None
    assert layer.weight.grad is not None
    assert torch.equal(given.grad, behind @ layer.weight.detach())
    assert torch.equal(layer.weight.grad, behind.t() @ given.detach())


def test_a_cast_counts_what_it_clamps_and_what_it_flushes() -> None:
    fp8, _ = converted("fp8-tensorwise")
    from trainledger.runtime.precision.tally import Tally, most

    tally = Tally()
    # 464 is half a step above the largest code, 448, which rounding brings back
    given = torch.tensor([448.0, -464.0, 465.0, -1e6, float("nan"), 2.0**-10, 2.0**-9, 0.0])
    codes = given.to(torch.float8_e4m3fn)
    assert not codes.float().isinf().any()
    tally.add("input", given, torch.ones(()), codes)
    assert tally.counts is not None
    assert tally.counts[0].tolist() == [8, 3, 1]
    assert most(torch.float8_e5m2) == 61440.0
    assert all(found.counts is None for found in fp8.tallies.values())


def test_what_torchao_cannot_convert_is_refused_and_never_left_out() -> None:
    spec = llama_spec({}, precision="fp8-rowwise")
    decoder = build_decoder(spec.model, spec.config)
    decoder.set_submodule("model.layers.1.mlp.up_proj", nn.Bilinear(1, 1, 1))
    with pytest.raises(Refused, match=r"\[runtime-fp8-layers\] model.layers.1.mlp.up_proj of .* is a Bilinear"):
        Fp8(spec, CPU).convert(decoder)


def test_only_a_layer_of_the_run_falls_back() -> None:
    fp8, _ = converted("fp8-forward")
    with pytest.raises(BadInput, match=r"'lm_head' is no FP8 layer of this run; name one such as model\.layers\.0"):
        fp8.fall_back("lm_head", [])
    fp8.fall_back(LAYER, [])
    fp8.layers[LAYER](torch.ones(16, 64, dtype=torch.bfloat16))
    assert fp8.tallies[LAYER].gemms == 0
    assert fp8.fallen == [LAYER]


RECIPES = ("fp8-tensorwise", "fp8-rowwise", "fp8-forward")
WIDE: dict[str, object] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
"""Wide enough that a rank's part of a matrix has moments in 8 bits."""


@pytest.mark.proof
def test_logits_in_fp8_are_near_those_in_bf16_and_are_not_those() -> None:
    specs = [llama_spec({}, sizes=WIDE, precision=name) for name in ("bf16", *RECIPES)]
    ((plain, *rest),) = run_forked(1, logits, specs)
    for found in rest:
        off = float((found - plain).norm() / plain.norm())
        assert 1e-3 < off < 1e-1


@pytest.mark.proof
@pytest.mark.parametrize(
    "plan",
    [{**SHARDED, "num_microbatches": 2}, {"tp": 2, "sp": 1}, {"pp": 2, "num_microbatches": 2}, {"cp": 2}],
    ids=["dp", "tp", "pp", "cp"],
)
def test_losses_in_fp8_follow_those_in_bf16_in_every_layout(plan: dict[str, int]) -> None:
    specs = [llama_spec(plan, sizes=WIDE, precision=name) for name in ("bf16", *RECIPES)]
    plain, *rest = run_forked(2, losses, specs, timeout_s=300)[1]
    assert None not in plain
    for found in rest:
        assert found == pytest.approx(plain, rel=2e-2)
        assert found != plain


@pytest.mark.proof
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_moments_in_8_bits_train_at_every_stage(zero_stage: int) -> None:
    plan = {"dp_shard": 2, "num_microbatches": 2, "zero_stage": zero_stage}
    specs = [llama_spec(plan, sizes=WIDE, optimizer=name) for name in ("adamw", "adamw-8bit", "adamw-fp8")]
    plain, *rest = run_forked(2, losses, specs, timeout_s=300)[0]
    for found in rest:
        assert found[:2] == pytest.approx(plain[:2], rel=1e-3)
        assert found[-1] == pytest.approx(plain[-1], rel=2e-2)
        assert found != plain


PROVEN: list[dict[str, Any]] = [
    *({"zero": zero, "precision": name} for zero in range(4) for name in ("fp16", *RECIPES)),
    *({"zero": zero, "optimizer": name} for zero in (0, 3) for name in ("adamw-8bit", "adamw-fp8")),
    {"zero": 3, "precision": "fp8-tensorwise", "tp": 2},
    {"zero": 1, "precision": "fp8-tensorwise", "pp": 2},
    {"zero": 2, "precision": "fp16", "pp": 2, "vpp": 2, "schedule": "interleaved"},
    {"zero": 3, "precision": "fp8-tensorwise", "model": "mixtral-8x7b"},
]


@pytest.mark.proof
@pytest.mark.timeout(300)
@pytest.mark.parametrize("flags", PROVEN, ids=lambda flags: "-".join(map(str, flags.values())))
def test_what_a_recipe_keeps_and_sends_is_proven_on_every_rank(flags: dict[str, Any]) -> None:
    asked = {"model": "llama-3-8b", "dp": 2, "timeout": 280, **flags}
    answer = run_proof(msgspec.convert(asked, Request))
    assert answer.verdict == "proven", [
        line for line in answer.lines if line.verdict in ("differs", "beyond", "missing")
    ]
