"""The shrunken run is legal, small, and of the same tensors: every preset under plans of every axis."""

from __future__ import annotations

from typing import Any

import pytest

from trainledger.facts.by_hand import config_by_hand, model_by_hand
from trainledger.facts.families import model_from_config
from trainledger.facts.model import Model
from trainledger.facts.model_load import load_with_config
from trainledger.facts.presets import preset_names
from trainledger.facts.workload import DEFAULT_SEQ, Workload
from trainledger.plans.plan import Scenario, make_plans
from trainledger.plans.setting import Setting, make_setting
from trainledger.rules import REFUSALS, RUNTIME, findings
from trainledger.rules.runtime import DRY, learned_positions
from trainledger.service.shrink import SMALL, Small, shrink, shrunken

BUDGET = 2_500_000
TP8 = {"tp": 8, "sp": 1, "etp": 8}
PLANS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp": {"dp_shard": 4, "num_microbatches": 64, "mbs": 16},
    "zero3": {"dp_shard": 3, "zero_stage": 3, "precision": "bf16"},
    "hsdp": {"dp_replicate": 2, "dp_shard": 4, "zero_stage": 2},
    "tp2": {"tp": 2, "sp": 1, "etp": 2, "precision": "bf16"},
    "tp4-no-sp": {"tp": 4, "etp": 4, "dp_shard": 2, "zero_stage": 1},
    "pp2": {"pp": 2, "num_microbatches": 8},
    "pp3": {"pp": 3, "num_microbatches": 5, "dp_shard": 2, "zero_stage": 1},
    "interleaved": {"pp": 2, "vpp": 2, "num_microbatches": 16, "schedule": "interleaved"},
    "cp2": {"cp": 2, "zero_stage": 3},
    "cp3": {"cp": 3, "seq": 4098},
    "ep2": {"ep": 2, "dp_shard": 2, "zero_stage": 2},
    "ep4": {"ep": 4, "dp_shard": 8, "zero_stage": 3, "precision": "bf16"},
    "rows": {"dp_shard": 16, "zero_stage": 3},
    "tokens": {"seq": 1 << 17},
    "all": {**TP8, "pp": 2, "cp": 2, "dp_shard": 2, "zero_stage": 3, "num_microbatches": 4},
}
FULL = {name: load_with_config(name) for name in preset_names()}


def setting_for(model: Model, plan: dict[str, Any], seq: int, layout: tuple[int, ...]) -> Setting:
    words: dict[str, Any] = {"precision": "fp32", "recompute": "none", "engine": "pytorch", "pp_layout": layout}
    words |= {name: plan[name] for name in ("precision", "schedule") if name in plan}
    return make_setting(model, Workload(seq=seq), Scenario(**words))


def row_of(plan: dict[str, Any]) -> dict[str, int]:
    return make_plans({key: value for key, value in plan.items() if isinstance(value, int) and key != "seq"}).row(0)


def broken(setting: Setting, row: dict[str, int]) -> list[str]:
    rules = (rule for rule in (*RUNTIME, *REFUSALS) if rule.id not in DRY)
    return [found.message for found in findings(rules, setting, make_plans(row))]


def smaller(config: dict[str, Any], model: Model, plan: dict[str, Any]) -> tuple[Setting, dict[str, int], Small]:
    """The full setting and row, and the small run."""
    seq = plan.get("seq") or min(DEFAULT_SEQ, learned_positions(model) or DEFAULT_SEQ)
    setting, row = setting_for(model, plan, seq, plan.get("layout", ())), row_of(plan)
    return setting, row, shrink(config, setting, row)


def names(model: Model) -> dict[str, tuple[Any, ...]]:
    """Every tensor's name, without layers and experts, with what does not hang on a size."""
    found: dict[str, tuple[Any, ...]] = {
        t.name: (t.role, len(t.shape), t.tp_dim, t.linear) for t in (*model.embedding, *model.final)
    }
    for block in model.blocks:
        found |= {f"{block.kind}/{t.name}": (t.role, len(t.shape), t.tp_dim, t.linear) for t in block.tensors}
    return found


def features(model: Model) -> list[tuple[object, ...]]:
    """What of each kind of block is no size."""
    return [
        (
            block.kind,
            block.norms,
            block.parallel,
            block.moe and (block.moe.top_k, block.moe.gated, bool(block.moe.shared_intermediate)),
            block.attention and (block.attention.kind, block.attention.qk_norm, block.attention.scores),
            block.attention and block.attention.window is None,
        )
        for block in model.blocks
    ]


@pytest.mark.parametrize("name", FULL)
def test_the_small_run_is_legal_small_and_of_the_same_tensors(name: str) -> None:
    config, model = FULL[name]
    judged = 0
    for plan in PLANS.values():
        seq = plan.get("seq") or min(DEFAULT_SEQ, learned_positions(model) or DEFAULT_SEQ)
        if broken(setting_for(model, plan, seq, ()), row_of(plan)):
            continue
        judged += 1
        setting, row, small = smaller(config, model, plan)
        assert small == shrink(config, setting, row)
        after = {**row, "mbs": small.mbs, "num_microbatches": small.num_microbatches}
        assert broken(setting_for(small.model, plan, small.seq, small.pp_layout), after) == []
        assert names(small.model) == names(model)
        assert features(small.model) == features(model)
        assert small.model.total_params < BUDGET
        assert small.model.tied == model.tied
        assert model_from_config(small.config, name=model.name, source=model.source) == small.model
    assert judged >= 5 or model.family == "nemotron_h"


@pytest.mark.parametrize("name", ["llama-3-70b", "qwen3-30b-a3b", "gemma-2-27b", "gpt-oss-20b"])
def test_ratios_of_heads_stay(name: str) -> None:
    config, model = FULL[name]
    _, _, small = smaller(config, model, PLANS["tp2"])
    (before,) = {b.attention.heads // b.attention.kv_heads for b in model.blocks if b.attention}
    (after,) = {b.attention.heads // b.attention.kv_heads for b in small.model.blocks if b.attention}
    assert before == after


def test_windows_stay_below_the_sequence_or_above_it() -> None:
    config, model = FULL["mistral-7b-v0.1"]
    for seq, slides in ((4096, False), (8192, True), (1 << 20, True)):
        _, _, small = smaller(config, model, {"seq": seq})
        (window,) = {block.attention.window for block in small.model.blocks if block.attention}
        assert window
        assert (1 < window < small.seq) == slides


def test_rotary_fractions_turn_an_even_number_of_features() -> None:
    sizes = {"hidden_size": 2560, "num_attention_heads": 32, "intermediate_size": 10240, "num_hidden_layers": 32}
    config = {"model_type": "phi", **sizes, "vocab_size": 51200, "partial_rotary_factor": 0.4}
    _, _, small = smaller(config, model_from_config(config, name="phi-2", source=""), PLANS["tp2"])
    head_dim = small.config["hidden_size"] // small.config["num_attention_heads"]
    assert int(head_dim * 0.4) == 6
    gptj = {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_layer": 28, "vocab_size": 50400}
    _, _, small = smaller(gptj, model_from_config(gptj, name="gpt-j-6b", source=""), {})
    assert (small.config["rotary_dim"], small.config["n_embd"] // small.config["n_head"]) == (2, 8)


def test_tables_by_frequency_are_as_long_as_the_small_heads_need() -> None:
    config, _ = FULL["phi-3-mini"]
    config = {**config, "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}}
    _, _, small = smaller(config, model_from_config(config, name="phi", source=""), {})
    assert small.config["rope_scaling"] == {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def test_keys_keep_the_spelling_that_the_config_has() -> None:
    config = {"model_type": "gpt2", "hidden_size": 768, "n_layer": 12, "num_attention_heads": 12, "vocab_size": 50257}
    _, _, small = smaller(config, model_from_config(config, name="g", source=""), {})
    assert (small.config["hidden_size"], small.config["n_layer"], small.config["num_attention_heads"]) == (32, 2, 4)
    assert "n_embd" not in small.config


def test_an_uneven_pipeline_stays_uneven() -> None:
    config, model = FULL["deepseek-v3"]
    _, _, small = smaller(config, model, {"pp": 4, "num_microbatches": 8})
    assert (model.num_layers % 4, small.model.num_layers) == (1, 5)
    _, _, small = smaller(*FULL["llama-3-8b"], {"pp": 4, "num_microbatches": 8, "layout": (9, 8, 8, 7)})
    assert (small.model.num_layers, small.pp_layout) == (8, (3, 2, 2, 1))
    _, _, small = smaller(*FULL["gemma-3-1b"], {"pp": 2, "num_microbatches": 8, "layout": (20, 6)})
    assert (small.model.num_layers, small.pp_layout) == (6, (5, 1))


def test_deepseek_keeps_a_dense_layer_and_groups_that_a_token_can_choose_from() -> None:
    config, model = FULL["deepseek-v3"]
    _, _, small = smaller(config, model, {"ep": 4, "dp_shard": 8})
    assert [block.kind for block in small.model.blocks] == ["dense", "moe"]
    groups, kept, top_k = (config[key] for key in ("n_group", "topk_group", "num_experts_per_tok"))
    experts = small.config["n_routed_experts"]
    assert experts % groups == experts % 4 == 0
    assert experts // groups * kept >= top_k
    assert experts > top_k


def test_experts_are_cut_where_they_were() -> None:
    """Between experts, or along their rows where more ranks share them than there are."""
    config, model = FULL["mixtral-8x7b"]
    for ranks, most in ((8, False), (16, True)):
        _, _, small = smaller(config, model, {"dp_shard": ranks, "zero_stage": 3})
        assert (ranks > small.config["num_local_experts"]) == most


def test_a_small_model_keeps_its_sizes_and_a_short_sequence_its_length() -> None:
    sizes: dict[str, Any] = {"hidden": 64, "layers": 5, "heads": 4, "ffn": 96, "vocab": 256}
    config, model = config_by_hand(**sizes), model_by_hand(**sizes)
    assert model.total_params < SMALL
    setting, row, small = smaller(config, model, {"seq": 24, "pp": 2, "num_microbatches": 3, "layout": (4, 1)})
    assert small.model.blocks == model.blocks
    assert (small.config, small.seq, small.pp_layout, small.num_microbatches) == (config, 24, (4, 1), 3)
    assert shrunken(setting, row, small) is None


def test_what_changed_is_said() -> None:
    setting, row, small = smaller(*FULL["mixtral-8x7b"], {"num_microbatches": 64, "mbs": 4})
    found = shrunken(setting, row, small)
    assert found is not None
    said = {change.what: (change.before, change.after) for change in found.changes}
    assert found.factor == 64
    assert said["hidden"] == (4096, 64)
    assert said["layers"] == (32, 2)
    assert said["experts"] == (8, 3)
    assert said["micro-batches"] == (64, 2)
    assert said["parameters"] == (46_702_792_704, small.model.total_params)


def test_a_model_by_hand_is_the_llama_of_its_config() -> None:
    sizes: dict[str, Any] = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 96, "vocab": 256}
    config = config_by_hand(**sizes)
    named = model_from_config(config, name="custom", source="sizes given by hand")
    by_hand = model_by_hand(**sizes)
    assert (named.embedding, named.blocks, named.final) == (by_hand.embedding, by_hand.blocks, by_hand.final)
