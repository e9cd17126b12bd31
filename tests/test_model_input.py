"""What a user can hand in as a model, and what is refused.

Presets, files, directories, hub ids and changed keys; all else is refused, with the value, the rule and the knob.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger.errors import BadInput, TrainledgerError, UnknownName
from trainledger.facts.families import family_of, model_from_config, model_types
from trainledger.facts.model_load import load_config, load_model, parse_config
from trainledger.facts.presets import aliases, load_preset, other_names, preset_config, preset_names

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}

# What the Hub's files carry besides shapes; none of it may stop a config from loading or change a count.
HUB_EXTRAS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "rope_scaling": {"rope_type": "llama3"},
        "pretraining_tp": 1,
        "torch_dtype": "bfloat16",
        "mlp_bias": False,
    },
    "llama-2-7b": {"max_length": 4096, "_name_or_path": "x", "transformers_version": "4.31.0.dev0", "use_cache": True},
    "qwen2.5-7b": {"max_window_layers": 28, "sliding_window": 131072, "use_sliding_window": False, "use_mrope": False},
    "qwen3-30b-a3b": {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0},
    "mistral-7b-v0.3": {"sliding_window": None, "rope_theta": 1000000.0, "head_dim": 128},
    "mixtral-8x7b": {"router_jitter_noise": 0.0, "sliding_window": None},
    "gemma-2-2b": {"cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh", "sliding_window_size": 4096},
    "gemma-3-1b": {"rope_local_base_freq": 10000, "sliding_window_pattern": 6, "attn_logit_softcapping": None},
    "deepseek-v2": {
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
        "seq_aux": True,
    },
    "deepseek-v3": {"ep_size": 1, "quantization_config": {"quant_method": "fp8"}, "auto_map": {"AutoConfig": "x.Y"}},
    "gpt2": {
        "n_ctx": 1024,
        "summary_type": "cls_index",
        "task_specific_params": {"text-generation": {"do_sample": True}},
    },
    "gpt-neox-20b": {"rotary_emb_base": 10000, "use_parallel_residual": True, "classifier_dropout": 0.1},
    "opt-125m": {"prefix": "</s>", "activation_dropout": 0.0, "layerdrop": 0.0, "_remove_final_layer_norm": False},
    "bloom-560m": {
        "n_inner": None,
        "offset_alibi": 100,
        "seq_length": 2048,
        "skip_bias_add_qkv": False,
        "unk_token_id": 0,
    },
    "falcon-7b": {"apply_residual_connection_post_layernorm": False, "alibi": False, "hidden_dropout": 0.0},
    "phi-3-mini": {
        "attention_bias": False,
        "sliding_window": 2047,
        "embd_pdrop": 0.0,
        "original_max_position_embeddings": 4096,
    },
    "command-r-plus": {"logit_scale": 0.8333, "use_parallel_block": True, "use_gated_activation": True},
    "gpt-oss-20b": {"swiglu_limit": 7.0, "quantization_config": {"quant_method": "mxfp4"}},
    "glm-4.5-air": {"num_nextn_predict_layers": 1, "norm_topk_prob": True, "topk_group": 1, "n_group": 1},
    "nemotron-h-56b": {"mamba_ssm_cache_dtype": "float32", "time_step_limit": [0.0, math.inf]},
}


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(BadInput) as caught:
        model_from_config(config, name="it", source="")
    return str(caught.value)


def parse_refusal(text: str) -> str:
    with pytest.raises(BadInput) as caught:
        parse_config(text, where="it.json")
    return str(caught.value)


def load_refusal(name: str, **overrides: str) -> str:
    with pytest.raises(TrainledgerError) as caught:
        load_model(name, overrides=overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(HUB_EXTRAS))
def test_keys_of_the_hub_that_change_no_shape_are_taken(name: str) -> None:
    config = {**preset_config(name), **HUB_EXTRAS[name]}
    assert model_from_config(config, name=name, source="").total_params == load_preset(name).total_params


def test_a_missing_shape_key_takes_the_default_of_its_class_and_the_model_says_so() -> None:
    model = model_from_config({"model_type": "llama"}, name="it", source="")
    assert model.total_params == 6_738_415_616
    assert "hidden_size=4096" in model.notes[0]
    assert "LlamaConfig" in model.notes[0]
    assert model.max_positions is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "64"}, ['hidden_size is "64" (a string)', "LlamaConfig takes a whole number", "write 64"]),
        ({"hidden_size": 64.0}, ["hidden_size is 64.0", "write 64"]),
        ({"hidden_size": -64}, ["hidden_size is -64", "at least 1", "--set hidden_size=N"]),
        ({"vocab_size": 0}, ["vocab_size is 0", "at least 1"]),
        ({"vocab_size": True}, ["vocab_size is true", "whole number"]),
        ({"vocab_size": None}, ["vocab_size is null"]),
        ({"vocab_size": math.inf}, ["vocab_size is Infinity"]),
        ({"attention_bias": "yes"}, ["attention_bias", "true or false"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings is 1", "true or false"]),
        ({"num_attention_heads": 5, "num_key_value_heads": None}, ["must divide hidden_size=64", "--set head_dim=N"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads is 3", "must divide num_attention_heads=4"]),
        ({"num_hidden_layer": 3}, ["'num_hidden_layer'", "nearest: num_hidden_layers", "--set num_hidden_layer=null"]),
        ({"tie_word_embedding": False}, ["nearest: tie_word_embeddings"]),
        ({"num_experts": 8}, ["'num_experts'", "could change shapes"]),
        ({"is_encoder_decoder": True}, ["is_encoder_decoder is true"]),
        ({"hidden_size": 2**63}, ["hidden_size", "at most 2**62"]),
        ({"hidden_size": 10**15, "vocab_size": 10**15}, ["model.embed_tokens.weight", "10**30 elements", "2**62"]),
        ({"num_hidden_layers": 10**9}, ["number of layers is 1000000000", "at most 100000"]),
        ({"intermediate_size": 10**15, "num_hidden_layers": 90_000}, ["dense block x 90000 layers", "2**62"]),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_rule_and_knob(change: dict[str, Any], words: list[str]) -> None:
    message = refusal({**LLAMA, **change})
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, ["cannot visit more than the 8 experts"]),
        ({"model_type": "deepseek_v2"}, ["num_experts_per_tok is null", "DeepseekV2Config has no default"]),
        ({"model_type": "deepseek_v3", "moe_layer_freq": 2}, ["moe_layer_freq is 2", "modelled for 1 only"]),
        (
            {"model_type": "gpt2", "n_layer": 2, "num_hidden_layers": 3},
            ["n_layer is 2", "num_hidden_layers is 3", "agree"],
        ),
        ({"model_type": "bloom", "n_inner": 100}, ["n_inner is 100", "4 x hidden_size = 256"]),
        (
            {"model_type": "gpt_oss", "num_hidden_layers": 2, "layer_types": ["full_attention"]},
            ["1 entries", "2 layers"],
        ),
        ({"model_type": "gpt_oss", "layer_types": ["odd"] * 36}, ['"odd"', "sliding_attention"]),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, ['"X"', "not one of M, *, -, E"]),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "MM", "num_hidden_layers": 3},
            ["pattern, which has 2"],
        ),
        ({"model_type": "qwen3", "head_dim": None}, ["head_dim is null"]),
        (
            {"model_type": "internlm3", "qkv_bias": True},
            ["attention_bias is", "same for mlp_bias", "qkv_bias and bias"],
        ),
        ({"model_type": "mpt", "expansion_ratio": 2}, ["expansion_ratio is 2", "modelled for 4 only"]),
        ({"model_type": "gpt_neo", "attention_types": [[["global"], 0]]}, ["attention_types is", "a list of runs"]),
        ({"model_type": "gpt_neo", "attention_types": [[["global"], 3]]}, ["3 entries", "24 layers"]),
        ({"model_type": "gpt_neo", "attention_types": [[["odd"], 24]]}, ['"odd"', "global, local"]),
        (
            {"model_type": "exaone4", "sliding_window_pattern": -1},
            ["sliding_window_pattern is -1", "one letter a layer"],
        ),
        (
            {"model_type": "llama5"},
            ["'llama5'", "nearest: llama", "all known: apertus", "--set model_type=NAME", "such as 7B"],
        ),
        ({"model_type": 3}, ["model_type is 3"]),
        ({"hidden_size": 64}, ["no model_type", "--set model_type=NAME"]),
        ({"model_type": "t5", "is_encoder_decoder": True}, ["encoder-decoder", "number of parameters as MODEL"]),
        (
            {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}},
            ["give it:text_config", "llama4_text"],
        ),
        (
            {"model_type": "mllama", "text_config": {"model_type": "x"}},
            ["has text_config", "only text decoders", "as MODEL"],
        ),
        ({"model_type": "qwen2_vl", "vision_config": {"depth": 1}}, ["has vision_config"]),
    ],
)
def test_what_a_family_cannot_be_is_refused(config: dict[str, Any], words: list[str]) -> None:
    message = refusal(config)
    for word in words:
        assert word in message


def test_a_class_name_stands_in_for_a_missing_model_type() -> None:
    config = {**LLAMA, "architectures": ["LlamaForCausalLM"]}
    del config["model_type"]
    assert model_from_config(config, name="it", source="").family == "llama"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{\n "model_type": "llama",\n "hidden_size": 4', ["line 3, column", "cut off"]),
        ('{"a": 1,}', ["line 1, column", "not JSON"]),
        ("", ["line 1, column 1", "cut off"]),
        ("[1, 2]", ["top level is a list", "object"]),
        ("3", ["single value (3)"]),
        ('{"hidden_size": 1, "hidden_size": 2}', ["'hidden_size' stands twice"]),
        ('{"a": {"b": 1, "b": 1}}', ["'b' stands twice"]),
        ('{"a": ' + "[" * 10_000 + "]" * 10_000 + "}", ["nest"]),
        ('{"a": ' + "[" * 1_000_000, ["nest"]),
        ('{"a": ' + '{"a":' * 500 + "1" + "}" * 501, ["nest"]),
        ('{"hidden_size": ' + "9" * 5000 + "}", ["too many digits"]),
    ],
)
def test_text_that_is_no_config_is_refused(text: str, words: list[str]) -> None:
    message = parse_refusal(text)
    for word in words:
        assert word in message


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused_but_never_crashes(text: str) -> None:
    try:
        config = parse_config(text, where="it")
    except BadInput:
        return
    assert isinstance(config, dict)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(model_types()), st.data())
def test_any_value_of_a_read_key_is_read_or_refused_but_never_crashes(model_type: str, data: st.DataObject) -> None:
    config: dict[str, Any] = {"model_type": model_type, "num_experts_per_tok": 1}
    for key in data.draw(st.lists(st.sampled_from(sorted(family_of(model_type).keys)), max_size=3)):
        config[key] = data.draw(JSON)
    try:
        model = model_from_config(config, name="it", source="")
    except TrainledgerError:
        return
    assert model.total_params > 0


def test_a_config_is_found_by_file_and_by_directory(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("\ufeff" + json.dumps(LLAMA), encoding="utf-8")
    by_directory, by_file = load_model(str(folder)), load_model(str(folder / "config.json"))
    assert by_directory.name == by_file.name == "my-model"
    assert by_directory.blocks == by_file.blocks


def test_a_path_that_holds_no_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(b"\x80\x04cos\nsystem\n.")
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe{")
    assert "without a config.json" in load_refusal(str(tmp_path))
    assert "holds weights" in load_refusal(str(tmp_path / "w.bin"))
    assert "not UTF-8" in load_refusal(str(tmp_path / "bad.json"))
    assert "does not exist" in load_refusal(str(tmp_path / "none.json"))
    with pytest.raises(BadInput, match="not a file"):
        load_config(tmp_path / "none.json")
    for odd in ("", " ", "a\0b", "x" * 5000, "~nobody-here/x"):
        assert load_refusal(odd)


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"llama-3-8b"):
        load_model("llama-3-8")


def test_every_alias_leads_to_a_preset() -> None:
    assert set(other_names()) <= set(preset_names())
    assert not set(aliases()) & set(preset_names())
    assert len(aliases()) == sum(map(len, other_names().values())), "a name stands under two presets"
    assert load_model("meta-llama/Meta-Llama-3-8B").name == "llama-3-8b"
    assert load_model("LLaMA-3.1-70B").total_params == 70_553_706_496


@pytest.mark.parametrize(
    ("name", "overrides", "total"),
    [
        ("llama-3-8b", {"num_hidden_layers": "1"}, 8_030_261_248 - 31 * 218_112_000),
        ("gpt2", {"num_hidden_layers": "1"}, 124_439_808 - 11 * 7_087_872),
        ("gpt2", {"n_positions": "2048"}, 124_439_808 + 1024 * 768),
        ("llama-3-8b", {"tie_word_embeddings": "true"}, 8_030_261_248 - 128_256 * 4096),
        ("qwen3-8b", {"model_type": "llama", "use_sliding_window": "null", "max_window_layers": "null"}, 8_190_726_144),
    ],
)
def test_a_key_can_be_set_by_any_of_its_spellings(name: str, overrides: dict[str, str], total: int) -> None:
    model = load_model(name, overrides=overrides)
    assert model.total_params == total
    assert model.notes[0].startswith("set by hand: ")


def test_setting_a_key_on_which_no_shape_depends_is_said() -> None:
    model = load_model("llama-3-8b", overrides={"rope_theta": "1e6", "num_hidden_layers": "2"})
    assert model.notes[1] == "set by hand, but no shape depends on it: rope_theta"


def test_setting_a_key_that_the_family_lacks_is_refused() -> None:
    assert "nearest: n_layer" in load_refusal("gpt2", n_layers="4")
    assert "llama reads vocab_size" in load_refusal("llama-3-8b", n_layers="4")
    assert "whole number" in load_refusal("llama-3-8b", num_hidden_layers="four")
    assert "24 entries" in load_refusal("gpt-oss-20b", num_hidden_layers="4")
    assert load_model("gpt-oss-20b", overrides={"num_hidden_layers": "4", "layer_types": "null"}).num_layers == 4


def fake_hub(monkeypatch: pytest.MonkeyPatch, outcomes: list[Exception | str]) -> list[bool]:
    """A huggingface_hub whose downloads end as told; returns whether each call was for the cache alone."""
    errors = ModuleType("huggingface_hub.errors")
    errors.HfHubHTTPError = type("HfHubHTTPError", (OSError,), {})  # type: ignore[attr-defined]
    for name, base in [("RepositoryNotFoundError", "HfHubHTTPError"), ("GatedRepoError", "RepositoryNotFoundError")]:
        setattr(errors, name, type(name, (getattr(errors, base),), {}))
    errors.EntryNotFoundError = type("EntryNotFoundError", (Exception,), {})  # type: ignore[attr-defined]
    errors.LocalEntryNotFoundError = type("LocalEntryNotFoundError", (errors.EntryNotFoundError,), {})  # type: ignore[attr-defined]
    errors.HFValidationError = type("HFValidationError", (ValueError,), {})  # type: ignore[attr-defined]
    calls: list[bool] = []

    def download(_repo: str, _file: str, *, local_files_only: bool = False) -> str:
        calls.append(local_files_only)
        outcome = outcomes[len(calls) - 1]
        if isinstance(outcome, str) and outcome.endswith("Error"):
            raise getattr(errors, outcome)("no")
        return str(outcome)

    hub = ModuleType("huggingface_hub")
    hub.hf_hub_download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    return calls


def test_a_hub_id_is_taken_from_the_cache_before_the_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    calls = fake_hub(monkeypatch, [str(tmp_path / "config.json")])
    model = load_model("someone/their-model")
    assert calls == [True]
    assert model.name == "their-model"
    assert model.source == "huggingface.co/someone/their-model"
    calls = fake_hub(monkeypatch, ["LocalEntryNotFoundError", str(tmp_path / "config.json")])
    assert load_model("someone/their-model").blocks == model.blocks
    assert calls == [True, False]


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ("LocalEntryNotFoundError", "cannot be reached"),
        ("GatedRepoError", "is gated"),
        ("RepositoryNotFoundError", "does not exist on the Hugging Face Hub"),
        ("EntryNotFoundError", "has no config.json"),
        ("HfHubHTTPError", "could not be fetched"),
    ],
)
def test_what_the_hub_cannot_give_is_refused(monkeypatch: pytest.MonkeyPatch, outcome: str, words: str) -> None:
    fake_hub(monkeypatch, ["LocalEntryNotFoundError", outcome])
    assert words in load_refusal("someone/their-model")


def test_without_the_extra_a_hub_id_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert 'pip install "trainledger[hf]"' in load_refusal("someone/their-model")
