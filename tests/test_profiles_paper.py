"""The ZeRO paper's accounting, DeepSpeed's estimators, and what each optimizer and workload adds."""

from __future__ import annotations

import pytest

from strategies import dense, elements, held, latent, llama, owned, routed, setting_of
from trainledger.facts.by_hand import model_from_count
from trainledger.facts.model import Model
from trainledger.facts.workload import Workload
from trainledger.profiles import PROFILES, engine_names, optimizers, read_profile

BILLION = 7_500_000_000
"""The 7.5B model of the ZeRO paper's figure 1, on 64 ranks."""


@pytest.mark.parametrize(("zero_stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_figure_1_of_the_paper(zero_stage: int, gigabytes: float) -> None:
    """7.5e9 parameters, K = 12, N = 64: 120, 31.4, 16.6, 1.9 GB. [zero-paper: figure 1]"""
    found = held(setting_of(model_from_count(BILLION), engine="paper"), dp_shard=64, zero_stage=zero_stage)
    assert round(found.at("step") / 1e9, 1) == gigabytes


@pytest.mark.parametrize("shards", [1, 7, 8, 64, 1 << 20])
@pytest.mark.parametrize("model", [dense(), dense(hidden=24, heads=3, kv_heads=3), llama("70b")])
def test_every_state_is_divided_evenly_from_its_stage(model: Model, shards: int) -> None:
    total = model.total_params
    share = -(-total // shards)
    for zero_stage in range(4):
        found = held(setting_of(model, engine="paper"), dp_shard=shards, zero_stage=zero_stage)
        assert found.of("weights") == 2 * (share if zero_stage >= 3 else total)
        assert found.of("gradients") == 2 * (share if zero_stage >= 2 else total)
        assert found.of("optimizer") == 12 * (share if zero_stage >= 1 else total)


def test_fp8_lm_keeps_6_bytes_per_parameter() -> None:
    """MS-AMP O2: fp16 weights, fp8 gradient, fp8 first and fp16 second moment."""
    setting = setting_of(model_from_count(1000), engine="paper", precision="fp8-lm", optimizer="adamw-msamp-o2")
    found = held(setting, zero_stage=0)
    assert (found.of("weights"), found.of("gradients"), found.of("optimizer")) == (2000, 1000, 3000)


@pytest.mark.parametrize(
    ("release", "zero_stage", "per_param"),
    [("", 2, 2), ("", 3, 0), ("0.14.2", 2, 4), ("0.14.2", 3, 0)],
)
def test_the_estimators_print_4_largest_plus_18_over_n(release: str, zero_stage: int, per_param: int) -> None:
    """Stage 2: 2P + 18P/N, and 4P + 16P/N before 0.14.3; stage 3: 4 x the largest layer + 18P/N."""
    model = llama("8b")
    found = held(
        setting_of(model, engine="deepspeed-estimator", framework_version=release), dp_shard=64, zero_stage=zero_stage
    )
    share = model.total_params / 64
    largest = 4 * model.vocab_size * model.hidden_size if zero_stage == 3 else 0
    divided = 16 if release == "0.14.2" and zero_stage == 2 else 18
    expected = per_param * model.total_params + divided * share + largest
    assert found.at("step") == pytest.approx(expected, abs=18)


def moments(model: Model, optimizer: str, **columns: object) -> int:
    """Optimizer bytes besides the master, in fp32 and unsharded unless columns say so."""
    setting = setting_of(model, engine="pytorch", precision="fp32", optimizer=optimizer)
    return held(setting, **{"zero_stage": 0, **columns}).of("optimizer")


@pytest.mark.parametrize(("optimizer", "per_param"), [("adamw", 8), ("sgd", 0), ("sgd-momentum", 4)])
def test_optimizers_that_keep_whole_moments(optimizer: str, per_param: int) -> None:
    assert moments(llama("8b"), optimizer) == per_param * llama("8b").total_params


@pytest.mark.parametrize("model", [llama("8b"), routed(), latent(), dense(hidden=24, heads=3, kv_heads=3)])
def test_adafactor_keeps_rows_and_columns_of_every_matrix(model: Model) -> None:
    tensors = owned(model)
    expected = sum((t.rows + t.rest if len(t.tensor.shape) > 1 else t.numel) * t.times for t in tensors)
    assert moments(model, "adafactor") == 4 * expected


@pytest.mark.parametrize("shards", [2, 3, 8, 16])
def test_sharded_adafactor_divides_rows_and_keeps_columns(shards: int) -> None:
    """A stacked tensor of experts has columns for each expert that the rank holds a whole or a part of."""
    model = routed()
    dense_ones, experts = ([t for t in owned(model) if t.expert is kind] for kind in (False, True))
    expected = sum((-(-t.rows // shards) + (t.rest if len(t.tensor.shape) > 1 else 0)) * t.times for t in dense_ones)
    for t in experts:
        layers, copies = t.times // 8, 8
        if shards <= copies:
            expected += layers * -(-copies // shards) * (t.rows + t.rest)
        else:
            expected += layers * copies * (-(-t.rows // shards) + t.rest)
    assert moments(model, "adafactor", dp_shard=shards, zero_stage=3) == 4 * expected


def test_muon_keeps_one_moment_of_matrices_in_blocks_and_two_of_the_rest() -> None:
    model = llama("8b")
    tensors = owned(model)
    matrices = elements([t for t in tensors if t.tensor.linear and t.tensor.role != "head"])
    assert moments(model, "muon") == 4 * matrices + 8 * (model.total_params - matrices)


def test_8_bit_adam_keeps_a_byte_and_a_scale_per_256_and_small_tensors_whole() -> None:
    model = llama("8b")
    norms = elements([t for t in owned(model) if t.numel < 4096])
    large = [t for t in owned(model) if t.numel >= 4096]
    tables = sum(t.times for t in large) * 256 * 4
    assert norms == 0
    assert moments(model, "adamw-8bit") == 2 * (elements(large) + 4 * elements(large) // 256 + tables)
    assert moments(model, "adamw-fp8") == 2 * (elements(large) + 4 * elements(large) // 256)
    small = dense(hidden=24, heads=3, kv_heads=3)
    ragged = elements([t for t in owned(small) if t.numel < 4096 or t.numel % 256])
    assert ragged == small.total_params
    assert moments(small, "adamw-8bit") == 8 * small.total_params


def test_bitsandbytes_pads_its_last_block_and_shares_its_tables() -> None:
    share = -(-llama("8b").total_params // 16) * 16 // 8
    found = held(setting_of(llama("8b"), engine="deepspeed", optimizer="adamw-8bit"), dp_shard=8, zero_stage=1)
    assert found.of("optimizer") == 4 * share + 2 * (share + 4 * -(-share // 256))


def test_an_ema_and_frozen_copies_are_counted() -> None:
    model = llama("8b")
    plain, more = (
        held(setting_of(model, workload, engine="paper"), dp_shard=8, zero_stage=3)
        for workload in (Workload(), Workload(ema=True, frozen_copy=2))
    )
    share = model.total_params // 8
    assert more.of("optimizer") - plain.of("optimizer") == 4 * share
    assert more.of("weights") - plain.of("weights") == 2 * 2 * share


def test_lora_trains_adapters_and_holds_the_rest_frozen_in_16_bits() -> None:
    model = llama("8b")
    workload = Workload(lora_rank=16, lora_targets=("q_proj", "v_proj"))
    adapters = 32 * 16 * ((4096 + 4096) + (4096 + 1024))
    found = held(setting_of(model, workload, engine="pytorch"), dp_shard=1, zero_stage=3)
    assert found.bytes["weights", "rest"] == 2 * model.total_params + 4 * adapters
    assert found.of("gradients") == 4 * adapters
    assert found.of("optimizer") == 8 * adapters


def test_qlora_keeps_nf4_inside_blocks_and_casts_the_rest_to_fp32() -> None:
    """4 + 8/64 + 32/(64 x 256) bits per weight. [qlora-paper: section 3]"""
    model = llama("8b")
    workload = Workload(lora_rank=16, lora_targets=("all-linear",), qlora=True)
    found = held(setting_of(model, workload, engine="paper"), zero_stage=0)
    linear = [t for t in owned(model) if t.tensor.linear and t.tensor.role != "head"]
    adapters = sum(16 * (t.rows + t.rest) * t.times for t in linear)
    rest = model.total_params - elements(linear)
    bits = 4 + 8 / 64 + 32 / (64 * 256)
    assert found.of("weights") - 2 * adapters - 4 * rest == pytest.approx(elements(linear) * bits / 8, abs=2)


@pytest.mark.parametrize("engine", engine_names())
def test_every_profile_names_optimizers_that_exist_and_conditions_that_can_hold(engine: str) -> None:
    for filename in PROFILES[engine]:
        profile = read_profile(engine, filename)
        assert set(profile.optimizers) <= set(optimizers())
        for row in profile.state:
            assert set(row.zero) & set(profile.zero_stages)
            assert set(row.precision) <= set(profile.precision)
            assert set(row.not_optimizer) <= set(profile.optimizers)
            assert {row.offload, row.not_offload} <= {"", *profile.offload}
