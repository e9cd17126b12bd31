"""Tensor-parallel traffic where engines differ: parallel blocks, experts, logits, gradients of whole tensors."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from strategies import calls_of, dense, latent, one_call, routed, setting_of
from trainledger.facts.model_load import load_model
from trainledger.facts.workload import Workload
from trainledger.plans.setting import Setting

LAYERS, HIDDEN, SEQ = 4, 64, 1024
WORK = Workload(seq=SEQ)
X = SEQ * HIDDEN * 2
"""Bytes of one hidden tensor of a micro-batch of one sequence."""


def ruled(setting: Setting, **rules: object) -> Setting:
    """The setting under an engine whose traffic differs in these rules."""
    traffic = msgspec.structs.replace(setting.profile.traffic, **rules)
    return dataclasses.replace(setting, profile=msgspec.structs.replace(setting.profile, traffic=traffic))


@pytest.mark.parametrize(("engine", "regions"), [("paper", 1), ("pytorch", 2)])
def test_a_parallel_block_has_one_pair_of_exchanges_or_two(engine: str, regions: int) -> None:
    model = load_model("falcon-7b", overrides={"num_hidden_layers": "3"})
    setting = setting_of(model, WORK, engine=engine, recompute="none")
    assert one_call(calls_of(setting, tp=71), "all_reduce", "tp", "hidden").count == 3 * 2 * regions + 2


@pytest.mark.parametrize("engine", ["pytorch", "torchtitan"])
def test_experts_that_tp_cuts_share_the_pair_of_the_shared_ones(engine: str) -> None:
    """Without expert parallelism a routed network is one more region, whatever is beside the experts."""
    for model, layers in ((routed(), 4), (latent(), 6)):
        calls = calls_of(setting_of(model, WORK, engine=engine, recompute="none"), tp=2, etp=2, sp=1)
        assert one_call(calls, "reduce_scatter", "tp", "hidden").count == 2 * 2 * layers + 2
        assert not [call for call in calls if call.group == "etp"]


def test_with_expert_parallelism_a_routed_network_has_no_region() -> None:
    calls = calls_of(setting_of(routed(), WORK, engine="pytorch", recompute="none"), tp=2, etp=1, ep=2, dp_shard=2)
    assert one_call(calls, "all_reduce", "tp", "hidden").count == 2 * 1 * LAYERS + 2


def test_without_loss_parallelism_logits_are_gathered_in_the_dtype_of_activations() -> None:
    """The loss needs no statistics then."""
    setting = ruled(setting_of(dense(vocab=256), WORK, engine="pytorch"), gathers_logits=True)
    calls = calls_of(setting, tp=2, num_microbatches=3)
    logits = one_call(calls, "all_gather", "tp", "logits")
    assert (logits.count, logits.dtype, logits.out_bytes) == (3, "bf16", 3 * SEQ * 256 * 2)
    assert not [call for call in calls if call.what == "loss statistics"]


def test_a_checkpoint_that_stops_early_repeats_a_reduction_that_a_norm_follows() -> None:
    """Gemma 2 normalises what attention and network give, Gemma does not."""
    counts: list[int] = []
    for name in ("gemma-2b", "gemma-2-2b"):
        model = load_model(name, overrides={"num_hidden_layers": str(LAYERS)})
        plain, again = (
            one_call(
                calls_of(setting_of(model, WORK, engine="pytorch", recompute=policy), tp=2, etp=1),
                "all_reduce",
                "tp",
                "hidden",
            ).count
            for policy in ("none", "full")
        )
        counts.append(again - plain)
    assert counts == [LAYERS, 2 * LAYERS]


def test_a_table_narrower_than_the_blocks_moves_its_own_width() -> None:
    """OPT-350m looks tokens up in 512 features and computes in 1024."""
    sizes = {"word_embed_proj_dim": "32", "hidden_size": "64", "num_attention_heads": "8", "num_hidden_layers": "4"}
    model = load_model("opt-125m", overrides={**sizes, "ffn_dim": "96", "vocab_size": "256"})
    hidden = one_call(
        calls_of(setting_of(model, WORK, engine="pytorch", recompute="none"), tp=2), "all_reduce", "tp", "hidden"
    )
    assert (hidden.count, hidden.in_bytes) == (4 * LAYERS + 2, 4 * LAYERS * X + 2 * X // 2)


@pytest.mark.parametrize(("zero_stage", "shards"), [(0, 1), (1, 4), (3, 4)])
def test_gradients_of_whole_tensors_are_summed_as_they_are_sharded(zero_stage: int, shards: int) -> None:
    """With sp all norms; once per step, in fp32, each rank its shard."""
    setting = setting_of(dense(vocab=256), WORK, engine="pytorch")
    plan = {"tp": 2, "dp_shard": 4, "zero_stage": zero_stage, "num_microbatches": 3}
    whole = one_call(calls_of(setting, sp=1, **plan), "all_reduce", "tp", "gradients of whole tensors")
    assert (whole.count, whole.dtype, whole.in_bytes) == (1, "fp32", (2 * LAYERS + 1) * HIDDEN * 4 // shards)
    assert not [call for call in calls_of(setting, **plan) if call.what == "gradients of whole tensors"]


def test_inside_a_region_whole_tensors_are_seen_in_part_without_sp_too() -> None:
    """MLA's down-projections and their norms, and routers; with sp the norms of blocks and the last one besides."""
    setting = setting_of(latent(), WORK, engine="pytorch")
    block = 24 * HIDDEN + 24 + (20 + 4) * HIDDEN + 20
    inside = 6 * block + 5 * 16 * HIDDEN
    for sp, elements in ((0, inside), (1, inside + (2 * 6 + 1) * HIDDEN)):
        whole = one_call(calls_of(setting, tp=2, sp=sp), "all_reduce", "tp", "gradients of whole tensors")
        assert (whole.count, whole.in_bytes) == (1, elements * 4)


def test_the_bias_of_a_row_parallel_matrix_is_seen_whole() -> None:
    """Without sp nothing of a GPT-NeoX is summed, with sp its norms and their biases are."""
    sizes = {"hidden_size": "64", "num_attention_heads": "8", "num_hidden_layers": "4", "intermediate_size": "96"}
    model = load_model("gpt-neox-20b", overrides=sizes)
    setting = setting_of(model, WORK, engine="pytorch")
    assert not [call for call in calls_of(setting, tp=2) if call.what == "gradients of whole tensors"]
    whole = one_call(calls_of(setting, tp=2, sp=1), "all_reduce", "tp", "gradients of whole tensors")
    assert whole.in_bytes == (2 * LAYERS + 1) * 2 * HIDDEN * 4
