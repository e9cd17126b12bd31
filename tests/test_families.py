"""Every family against transformers itself: counts, names, shapes and order of registration, from a frozen oracle.

`data/families_oracle.json` is written by `scripts/family_oracle.py` with the release it names; `data/truth_params.csv`
holds exact totals of published models with where they come from.
"""

from __future__ import annotations

import csv
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trainledger.errors import BadInput
from trainledger.facts import families
from trainledger.facts.families import FAMILY_FILES, family_of, model_from_config, model_types
from trainledger.facts.families.keys import COMMON_FIXED, COMMON_IGNORED
from trainledger.facts.model import Model, Tensor
from trainledger.facts.presets import load_preset, preset_names

DATA = Path(__file__).parent / "data"
FROZEN: dict[str, Any] = json.loads((DATA / "families_oracle.json").read_text(encoding="utf-8"))
ORACLE: list[dict[str, Any]] = FROZEN["cases"]
TRUTH = list(csv.DictReader((DATA / "truth_params.csv").read_text(encoding="utf-8").splitlines()))
SHAPELESS = {"max_position_embeddings", "n_positions", "sliding_window", "sliding_window_pattern", "layer_types"}
IN_CODE = {"sliding_window_pattern", "full_attention_interval", "global_head_dim"}
SHARED_FILES = {"__init__", "common", "experts", "keys"}


def built(case: dict[str, Any]) -> Model:
    return model_from_config({"model_type": case["type"], **case["config"]}, name=case["case"], source="oracle")


def case_id(case: dict[str, Any]) -> str:
    return f"{case['type']}-{case['case']}"


def expand(tensor: Tensor, prefix: str) -> dict[str, list[int]]:
    """State-dict entries of one Tensor: an entry for each expert, or one stack of them."""
    if "{e}" in tensor.name:
        return {prefix + tensor.name.replace("{e}", str(e)): list(tensor.shape) for e in range(tensor.copies)}
    stacked = [tensor.copies] if tensor.copies > 1 else []
    return {prefix + tensor.name: [*stacked, *tensor.shape]}


def state_dict(model: Model) -> dict[str, list[int]]:
    out: dict[str, list[int]] = {}
    for tensor in model.embedding:
        out |= expand(tensor, "")
    kind_of = {layer: block for block in model.blocks for layer in block.layers}
    for layer in sorted(kind_of):
        for tensor in kind_of[layer].tensors:
            out |= expand(tensor, model.layer_prefix.replace("{i}", str(layer)))
    for tensor in model.final:
        out |= expand(tensor, "")
    return out


def order(names: list[str]) -> list[str]:
    """The names of layers, without the index of an expert, each once; a numbered matrix by itself is no layer."""
    layers = [name for name in names if re.search(r"\.\d+\.(?!weight$|bias$)", name)]
    inside = [re.sub(r"\.(experts|norms)\.\d+\.", r".\1.", name) for name in layers]
    return list(dict.fromkeys(inside))


@pytest.mark.parametrize("row", TRUTH, ids=lambda row: row["model"])
def test_totals_of_published_models_are_exact(row: dict[str, str]) -> None:
    model = load_preset(row["model"])
    assert model.total_params == int(row["params_exact"])
    assert model.active_params == int(row["active_params"])


@pytest.mark.parametrize("case", ORACLE, ids=case_id)
def test_total_is_that_of_transformers(case: dict[str, Any]) -> None:
    assert built(case).total_params == case["total"]


@pytest.mark.parametrize("case", [case for case in ORACLE if "tensors" in case], ids=case_id)
def test_names_shapes_and_order_are_those_of_the_checkpoint(case: dict[str, Any]) -> None:
    assert sum(math.prod(shape) for shape in case["tensors"].values()) == case["total"]
    ours = state_dict(built(case))
    assert ours == case["tensors"]
    assert order(list(ours)) == order(list(case["tensors"]))


@pytest.mark.parametrize("case", ORACLE, ids=case_id)
def test_a_model_is_whole(case: dict[str, Any]) -> None:
    model = built(case)
    layers = sorted(layer for block in model.blocks for layer in block.layers)
    assert layers == list(range(model.num_layers))
    assert len({block.kind for block in model.blocks}) == len(model.blocks)
    for block in model.blocks:
        assert len({tensor.name for tensor in block.tensors}) == len(block.tensors)
        assert block.moe is None or any(tensor.role == "expert" for tensor in block.tensors)
        assert not (block.moe and block.mlp)
        for tensor in block.tensors:
            assert_cut_is_possible(tensor)
    assert model.tied == (
        not any(
            tensor.role == "head" and tensor.shape[0] == model.vocab_size and tensor.linear for tensor in model.final
        )
    )


def assert_cut_is_possible(tensor: Tensor) -> None:
    assert tensor.linear <= (len(tensor.shape) == 2)
    if tensor.tp_dim is None:
        assert tensor.tp_units == 0
    elif tensor.tp_units:
        assert tensor.shape[tensor.tp_dim] % tensor.tp_units == 0


def test_the_index_lists_every_file_and_every_model_type() -> None:
    folder = Path(families.__file__).parent
    assert {file for file, _ in FAMILY_FILES} == {path.stem for path in folder.glob("*.py")} - SHARED_FILES
    for file, types in FAMILY_FILES:
        module = __import__(f"trainledger.facts.families.{file}", fromlist=["FAMILIES"])
        held = [name for family in module.FAMILIES for name in (family.name, *family.model_types)]
        assert sorted(held) == sorted(types)


@pytest.mark.parametrize("model_type", model_types())
def test_every_family_has_oracle_cases_and_clear_keys(model_type: str) -> None:
    family = family_of(model_type)
    cases = [case for case in ORACLE if case["type"] == family.name]
    assert len(cases) >= 4
    assert any("tensors" in case for case in cases)
    read, fixed = family.read_keys, set(family.fixed_keys)
    assert not read & family.ignored_keys
    assert not fixed & (read | family.ignored_keys)
    assert not COMMON_IGNORED & set(COMMON_FIXED)
    turned = {name for case in cases for name in case["config"]}
    shaping = {name: {name, *key.aliases} for name, key in family.keys.items() if name not in SHAPELESS}
    assert not [name for name, spellings in shaping.items() if not spellings & turned]


@pytest.mark.parametrize("model_type", sorted(FROZEN["defaults"]))
def test_defaults_are_those_of_the_config_class(model_type: str) -> None:
    family, fields = family_of(model_type), FROZEN["defaults"][model_type]
    for name, value in family.defaults.items():
        spelling = next((known for known in (name, *family.keys[name].aliases) if known in fields), None)
        if spelling is None:
            # not a field: the class takes it from the config's other keys, with this fallback in its code
            assert value is None or name in IN_CODE
        elif name not in SHAPELESS or value is not None:
            assert value == fields[spelling], name


@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v3", "nemotron-h-56b", "gpt-oss-20b"])
def test_a_model_survives_json(name: str) -> None:
    model = load_preset(name)
    assert msgspec.json.decode(msgspec.json.encode(model), type=Model) == model


def test_multi_token_prediction_of_deepseek_v3_and_glm() -> None:
    # 685B in the checkpoint: 671B and one depth that stores the embedding and the output layer once more.
    # https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md
    v3 = load_preset("deepseek-v3")
    assert v3.mtp is not None
    assert v3.mtp_depths == 1
    assert v3.mtp.layers == (61,)
    copies = 2 * v3.vocab_size * v3.hidden_size
    router_biases = 59 * 256
    stored = v3.total_params + v3.mtp.numel + copies + router_biases
    assert stored == 684_489_845_504
    air = load_preset("glm-4.5-air")
    assert air.mtp is not None
    assert air.total_params + air.mtp.numel + 2 * air.vocab_size * air.hidden_size + 46 * 128 == 110_468_824_832


def test_windows_split_blocks_that_hold_the_same() -> None:
    model = load_preset("gemma-2-2b")
    sliding, full = model.blocks
    assert sliding.tensors == full.tensors
    assert sliding.attention is not None
    assert sliding.attention.window == 4096
    assert full.attention is not None
    assert full.attention.window is None
    assert sliding.layers == tuple(range(0, 26, 2))


@pytest.mark.parametrize(
    ("config", "full"),
    [
        ({"model_type": "exaone4", "num_hidden_layers": 8}, (3, 7)),
        ({"model_type": "exaone4", "num_hidden_layers": 8, "sliding_window_pattern": "LLG"}, (2, 5)),
        ({"model_type": "exaone4", "num_hidden_layers": 2, "sliding_window_pattern": None}, (0, 1)),
        ({"model_type": "gpt_neo", "num_layers": 4}, (0, 2)),
        ({"model_type": "gpt_neo", "num_layers": 3, "attention_types": [[["global", "global", "local"], 1]]}, (0, 1)),
        ({"model_type": "smollm3", "num_hidden_layers": 2, "sliding_window": 8}, (0, 1)),
        (
            {"model_type": "smollm3", "num_hidden_layers": 5, "sliding_window": 8, "use_sliding_window": True},
            (0, 1, 2, 4),
        ),
    ],
)
def test_which_layers_see_everything(config: dict[str, Any], full: tuple[int, ...]) -> None:
    model = model_from_config(config, name="it", source="")
    seen = [block.layers for block in model.blocks if block.attention and block.attention.window is None]
    assert tuple(sorted(layer for layers in seen for layer in layers)) == full


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"model_type": "jamba", "attn_layer_offset": 8},
            "attn_layer_offset is 8; it must be below attn_layer_period=8",
        ),
        (
            {"model_type": "jamba", "mamba_dt_rank": "some"},
            'mamba_dt_rank is "some" (a string); it takes a whole number',
        ),
        ({"model_type": "falcon_h1", "mamba_d_head": 7}, "mamba_d_head is 7; the mixer is 1024 wide, which makes 8"),
        ({"model_type": "granitemoehybrid", "mamba_n_heads": 48}, "mamba_n_heads is 48; it must divide the mixer's"),
        ({"model_type": "gemma3n_text", "intermediate_size": [8, 8]}, "its 2 entries are not the 35 layers"),
        ({"model_type": "hunyuan_v1_moe", "num_shared_expert": 2}, "num_shared_expert is 2; only 1 is modelled"),
        ({"model_type": "minimax", "num_hidden_layers": 2, "attn_type_list": [0, 2]}, "0 is lightning attention"),
        (
            {"model_type": "lfm2", "block_ffn_dim_multiplier": 0},
            "block_ffn_dim_multiplier is 0; Lfm2Config takes a number",
        ),
        ({"model_type": "glm_moe_dsa", "index_topk_pattern": "FX"}, 'its entry "X" (a string) is not one of F, S'),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput) as caught:
        model_from_config(config, name="it", source="")
    assert words in str(caught.value)


def test_maverick_alternates_dense_and_routed_layers() -> None:
    config = {"model_type": "llama4_text", "num_local_experts": 128, "interleave_moe_layer_step": 2}
    model = model_from_config(config, name="maverick", source="")
    routed = [block for block in model.blocks if block.moe]
    assert sorted(layer for block in routed for layer in block.layers) == list(range(1, 48, 2))
    assert 16e9 < model.active_params < 18e9


def test_a_preset_is_built_in_two_milliseconds() -> None:
    load_preset("llama-3-70b")
    best = min(_seconds("llama-3-70b") for _ in range(20))
    assert best < 0.002


def _seconds(name: str) -> float:
    start = time.perf_counter()
    load_preset(name)
    return time.perf_counter() - start


def test_presets_are_the_models_of_the_truth_table() -> None:
    assert set(preset_names()) == {row["model"] for row in TRUTH}
