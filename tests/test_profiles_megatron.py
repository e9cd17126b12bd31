"""Megatron-Core at d98e8a64dd: buffers of its DDP and distributed optimizer, FP8 workspaces, and Megatron-FSDP."""

from __future__ import annotations

from math import lcm

import numpy as np
import pytest

from strategies import Held, dense, elements, held, latent, llama, owned, plan_of, routed, setting_of, up
from trainledger.account.ledger import entry
from trainledger.facts.cluster import find_accelerator
from trainledger.facts.model import Model
from trainledger.facts.model_load import load_model
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.plans.partition import chunk_factor, megatron_layout
from trainledger.plans.plan import Scenario
from trainledger.plans.setting import Setting, make_setting

MODELS = {"70b": llama("70b"), "8b": llama("8b"), "small": dense(), "tied": dense(tied=True)}
MANY = pytest.mark.parametrize("name", MODELS)
SHARDS = pytest.mark.parametrize("shards", [1, 3, 8, 24, 64])


def megatron(name: str, **scenario: object) -> Setting:
    return setting_of(MODELS[name], engine="megatron", **scenario)


def sizes_of(model: Model, *, tp: int = 1, **cut: object) -> list[int]:
    """Element counts of every tensor a rank registers; the order does not matter to a single bucket."""
    return [t.numel for t in owned(model, tp=tp, vocab_multiple=128, **cut) for _ in range(t.times)]  # type: ignore[arg-type]


def buffer_of(model: Model, shards: int, *, tp: int = 1, **cut: object) -> int:
    """The buffer that Megatron's own layout gives: one bucket."""
    ranges, _ = megatron_layout(sizes_of(model, tp=tp, **cut), shards)
    assert len(ranges) == 1
    return ranges[0][1]


@MANY
def test_without_the_distributed_optimizer_18_bytes_per_parameter(name: str) -> None:
    total = elements(owned(MODELS[name], vocab_multiple=128))
    found = held(megatron(name), dp_shard=8, zero_stage=0)
    assert {found.at(instant) for instant in ("rest", "loss", "backward", "step")} == {18 * total}


@MANY
@SHARDS
def test_the_distributed_optimizer_keeps_6_plus_12_over_n(name: str, shards: int) -> None:
    whole = buffer_of(MODELS[name], shards)
    found = held(megatron(name), dp_shard=shards, zero_stage=1)
    assert {found.at(instant) for instant in ("rest", "backward", "step")} == {(2 + 4) * whole + 12 * whole // shards}


@MANY
@SHARDS
def test_16_bit_gradients_cost_an_fp32_shard_in_the_step(name: str, shards: int) -> None:
    whole = buffer_of(MODELS[name], shards)
    found = held(megatron(name, grad_dtype="bf16"), dp_shard=shards, zero_stage=1)
    assert found.at("backward") == (2 + 2) * whole + 12 * whole // shards
    assert found.at("step") == found.at("backward") + 4 * whole // shards
    assert found == held(megatron(name, precision="fp16"), dp_shard=shards, zero_stage=1)


@MANY
@SHARDS
@pytest.mark.parametrize(("optimizer", "moment"), [("adamw-bf16", 2), ("adamw-remainder", 4)])
def test_the_precision_aware_optimizer_keeps_a_remainder(name: str, shards: int, optimizer: str, moment: int) -> None:
    """Of 16 bits for the master, beside its moments; it reads bf16 gradients without a copy."""
    whole = buffer_of(MODELS[name], shards)
    found = held(megatron(name, grad_dtype="bf16", optimizer=optimizer), dp_shard=shards, zero_stage=1)
    kept = (2 + 2) * whole + (2 + 2 * moment) * whole // shards
    assert {found.at(instant) for instant in ("rest", "step")} == {kept}


@pytest.mark.parametrize(
    ("recipe", "master"),
    [("bf16", 2), ("fp8-delayed", 2), ("nvfp4", 2), ("fp8-tensorwise", 4), ("fp8-blockwise", 4), ("mxfp8", 4)],
)
def test_the_master_stays_whole_under_fp8_recipes_other_than_delayed(recipe: str, master: int) -> None:
    """use_precision_aware_optimizer_no_fp8_or_ds_fp8. [optimizer_config.py 407-414]"""
    whole = buffer_of(MODELS["8b"], 8)
    found = held(megatron("8b", precision=recipe, grad_dtype="bf16", optimizer="adamw-bf16"), dp_shard=8, zero_stage=1)
    assert found.of("optimizer") == (master + 4) * whole // 8
    assert found.bytes["buffers", "step"] == (4 * whole // 8 if master == 4 else 0)


def test_fp32_keeps_no_master() -> None:
    whole = buffer_of(MODELS["8b"], 8)
    assert held(megatron("8b", precision="fp32"), dp_shard=8, zero_stage=1).at("step") == 8 * whole + 8 * whole // 8


def test_a_hybrid_sharding_group_is_that_of_one_instance() -> None:
    whole = buffer_of(MODELS["8b"], 16)
    found = held(megatron("8b"), dp_shard=8, dp_replicate=4, cp=2, zero_stage=1)
    assert found.of("optimizer") == 12 * whole // 16


def test_offloading_the_optimizer_pins_16_bytes_over_n() -> None:
    """An fp32 copy of parameter and gradient, and the moments. [cpu_offloading/hybrid_optimizer.py]"""
    whole = buffer_of(MODELS["8b"], 8)
    found = held(megatron("8b", offload=("optimizer",)), dp_shard=8, zero_stage=1)
    assert found.host == 16 * whole // 8
    assert found.at("step") == 6 * whole


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_vocabulary_is_padded_to_128_times_tp_and_kv_heads_are_cut(tp: int) -> None:
    model = MODELS["small"]
    vocab = up(model.vocab_size, 128 * tp) // tp
    found = held(megatron("small"), tp=tp, dp_shard=3, zero_stage=1)
    assert found.of("weights") == 2 * buffer_of(model, 3, tp=tp)
    assert vocab * model.hidden_size in sizes_of(model, tp=tp)


def test_kv_heads_are_copied_where_tp_exceeds_them() -> None:
    """Each of 8 ranks holds one of 4 KV heads whole, so k and v count twice over the group."""
    model = MODELS["small"]
    table = Inventory(setting_of(model, engine="megatron")).table
    local = table.local(plan_of(tp=8), setting_of(model, engine="megatron").profile)
    for name, rows in zip(table.names, local.rows[0].tolist(), strict=True):
        if "k_proj" in name or "v_proj" in name:
            assert rows == model.hidden_size // 8


@pytest.mark.parametrize("shards", [24, 200, 640])
def test_an_embedding_that_both_ends_hold_is_alone_in_its_bucket(shards: int) -> None:
    """The layout closes a bucket before and after it; both ends pad twice. [distrib_optimizer.py 530-572]"""
    model = MODELS["tied"]
    half = model.num_layers // 2
    word = up(model.vocab_size, 128) * model.hidden_size
    first = [t.numel for t in owned(model, layers=range(half), ends=(False, False)) for _ in range(t.times)]
    last = [t.numel for t in owned(model, layers=range(half, 2 * half), ends=(False, True)) for _ in range(t.times)]
    for stage, (sizes, at) in enumerate((([word, *first], 0), ([*last, word], len(last)))):
        ranges, _ = megatron_layout(sizes, shards, shared=[at])
        found = held(megatron("tied"), stage, pp=2, dp_shard=shards, zero_stage=1)
        assert len(ranges) == 2
        assert found.of("weights") == 2 * ranges[-1][1]


@pytest.mark.parametrize("model", [routed(), routed(3), latent()], ids=["mixtral", "three", "deepseek"])
@pytest.mark.parametrize(("tp", "etp", "ep"), [(1, 1, 1), (2, 2, 1), (2, 1, 1), (1, 1, 2), (2, 1, 2), (2, 2, 2)])
def test_experts_have_a_buffer_of_their_own_only_where_their_group_differs(
    model: Model, tp: int, etp: int, ep: int
) -> None:
    shards = 6
    tensors = owned(model, tp=tp, etp=etp, ep=ep, vocab_multiple=128)
    sizes = {expert: [t.numel for t in tensors if t.expert == expert for _ in range(t.times)] for expert in (0, 1)}
    group = tp * shards // (etp * ep)
    if ep == 1 and etp == tp:
        buffers = [(megatron_layout(sizes[0] + sizes[1], shards)[0][-1][1], shards)]
    else:
        buffers = [(megatron_layout(sizes[e], n)[0][-1][1], n) for e, n in ((0, shards), (1, group))]
    found = held(setting_of(model, engine="megatron"), tp=tp, etp=etp, ep=ep, dp_shard=shards, zero_stage=1)
    assert found.of("weights") == sum(2 * size for size, _ in buffers)
    assert found.of("gradients") == sum(4 * size for size, _ in buffers)
    assert found.of("optimizer") == sum(12 * size // n for size, n in buffers)


@pytest.mark.parametrize(
    ("recipe", "card", "extra"),
    [
        ("fp8-delayed", "H100-SXM5-80GB", 1 + 1),
        ("fp8-tensorwise", "L40S", 1 + 1),
        ("fp8-tensorwise", "RTX-5090", 1 + 1),
        ("fp8-tensorwise", "B200-SXM", 1),
        ("fp8-delayed", "B300-SXM", 1),
        ("fp8-delayed", "", 1 + 1),
        ("fp8-blockwise", "H100-SXM5-80GB", 1 + 1 + 2 * 4 / (128 * 128)),
        ("mxfp8", "B200-SXM", 1 + 1 + 2 / 32),
        ("nvfp4", "B200-SXM", 0.5 + 0.5 + 2 / 16),
    ],
)
def test_transformer_engine_keeps_a_workspace_beside_every_linear_in_a_block(
    recipe: str, card: str, extra: float
) -> None:
    """Per weight element; where the card lacks non-TN FP8 matrix products, the transposed copy too."""
    tensors = [t for t in owned(MODELS["8b"]) if t.tensor.linear and t.tensor.role != "head"]
    accelerator = find_accelerator(card) if card else None
    setting = make_setting(
        MODELS["8b"], Workload(), Scenario(engine="megatron", precision=recipe), accelerator=accelerator
    )
    plain = held(megatron("8b"), dp_shard=8, zero_stage=1).of("weights")
    assert held(setting, dp_shard=8, zero_stage=1).of("weights") - plain == extra * elements(tensors)


def unit_elements(model: Model, shards: int) -> int:
    """Megatron-FSDP's buckets: embedding, each layer, what follows; each to the ranks times its chunk factor."""
    layers = [owned(model, layers=range(i, i + 1), ends=(False, False)) for i in range(model.num_layers)]
    ends = [owned(model, layers=range(0), ends=ends, vocab_multiple=128) for ends in ((True, False), (False, True))]
    total = 0
    for unit in [*layers, *ends]:
        factor = 1
        for tensor in sorted((t for t in unit if len(t.tensor.shape) > 1), key=lambda t: -t.rest):
            fits = factor % tensor.rest == 0 and tensor.numel % factor == 0
            factor = factor if fits else lcm(factor, tensor.rest)
        total += up(elements(unit), shards * factor)
    return total


@pytest.mark.parametrize("name", ["70b", "8b", "small"])
@pytest.mark.parametrize("shards", [1, 8, 24, 64])
def test_megatron_fsdp_divides_2_4_2_8(name: str, shards: int) -> None:
    model = MODELS[name]
    share = unit_elements(model, shards) // shards
    found = held(megatron(name), dp_shard=shards, zero_stage=3)
    assert found.at("rest") == (2 + 2 + 4 + 8) * share
    two = held(megatron(name), dp_shard=shards, zero_stage=2)
    assert two.at("rest") == 2 * share * shards + (2 + 4 + 8) * share
    fp32 = held(megatron(name, grad_dtype="fp32"), dp_shard=shards, zero_stage=3)
    assert fp32.at("rest") - found.at("rest") == 2 * share


def test_megatron_fsdp_gathers_ahead_and_queues_whole_small_models() -> None:
    """Half of a 1e9-element unit ahead and all of it waiting: more than a small model has."""
    total = elements(owned(MODELS["small"], vocab_multiple=128))
    found: Held = held(megatron("small"), dp_shard=8, zero_stage=3)
    block = elements(owned(MODELS["small"], layers=range(1), ends=(False, False)))
    assert found.bytes["buffers", "loss"] == 2 * block + 2 * total
    assert found.bytes["buffers", "backward"] == 2 * block + 2 * total + 2 * total


def test_megatron_fsdp_gathers_half_a_billion_ahead_and_queues_a_billion() -> None:
    """Where a unit is smaller than that; the queue of stage 2 as well. [megatron_fsdp.py 420-444]"""
    model = load_model("mistral-7b-v0.1")
    block = elements(owned(model, layers=range(1), ends=(False, False)))
    assert block < 500_000_000
    three, two = (held(setting_of(model, engine="megatron"), dp_shard=8, zero_stage=stage) for stage in (3, 2))
    assert three.bytes["buffers", "loss"] == 2 * block + 2 * 500_000_000
    assert three.bytes["buffers", "backward"] == 2 * block + 2 * 500_000_000 + 2 * 1_000_000_000
    assert two.bytes["buffers", "backward"] == 2 * 1_000_000_000


def test_a_chunk_factor_grows_by_least_common_multiples() -> None:
    block = owned(llama("70b"), layers=range(1), ends=(False, False))
    rest = [[t.rest for t in block]]
    assert chunk_factor(np.array(rest), np.array([[t.numel for t in block]])).tolist() == [57344]


def test_a_ledger_names_every_buffer_once() -> None:
    for zero_stage in range(4):
        lines = entry(Inventory(megatron("70b", precision="mxfp8")), plan_of(dp_shard=8, zero_stage=zero_stage)).lines
        ids = [line.id for line in lines]
        assert len(ids) == len(set(ids))
