"""Checkpoints: what is written is read back, and what does not fit is refused before anything changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_cases import CASES, decoder_of, facts, tokens_of
from trainledger.errors import BadInput
from trainledger.facts.families import model_from_config
from trainledger.runtime.model import (
    Decoder,
    build_decoder,
    decoder_tensors,
    init_weights,
    load_safetensors,
    save_safetensors,
)


def empty(case: str) -> Decoder:
    """A decoder with other values than `decoder_of` gives."""
    made = build_decoder(facts(case), CASES[case])
    init_weights(made, 9)
    return made


def saved(case: str, folder: Path) -> Path:
    """A checkpoint of a case in one file."""
    save_safetensors(decoder_tensors(decoder_of(case)), folder / "model.safetensors")
    return folder / "model.safetensors"


def changed(path: Path, **tensors: torch.Tensor | None) -> None:
    """The file again with tensors added or replaced, or taken away where None."""
    held = load_file(path) | {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file({name: held[name] for name in held if tensors.get(name, held) is not None}, path)


@pytest.mark.parametrize(
    "case", ["mixtral", "gpt_oss", "gpt2", "opt-350m-like", "stablelm-parallel-qk-norm", "qwen2-tied-window"]
)
def test_what_is_saved_is_loaded(case: str, tmp_path: Path) -> None:
    written, read = decoder_of(case), empty(case)
    load_safetensors(read, saved(case, tmp_path))
    assert all(torch.equal(read.get_parameter(name), parameter) for name, parameter in written.named_parameters())
    with torch.no_grad():
        assert torch.equal(read(tokens_of(case)), written(tokens_of(case)))


def test_experts_have_the_names_of_the_hub_on_disk(tmp_path: Path) -> None:
    held = load_file(saved("mixtral", tmp_path))
    stack = decoder_of("mixtral").get_parameter("model.layers.2.block_sparse_moe.experts.*.w3.weight")
    assert torch.equal(held["model.layers.2.block_sparse_moe.experts.3.w3.weight"], stack[3])
    assert not [name for name in held if "*" in name]


def test_a_checkpoint_in_parts_is_found_by_its_index(tmp_path: Path) -> None:
    held = load_file(saved("llama", tmp_path))
    (tmp_path / "model.safetensors").unlink()
    parts = {name: f"part-{at % 2}.safetensors" for at, name in enumerate(held)}
    for part in set(parts.values()):
        save_file({name: held[name] for name, where in parts.items() if where == part}, tmp_path / part)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": parts}), encoding="utf-8")
    decoder = empty("llama")
    load_safetensors(decoder, tmp_path)
    assert torch.equal(decoder.get_parameter("model.norm.weight"), held["model.norm.weight"])
    for text, words in (
        ('{"weight_map": {"model.norm.weight": "../part-0.safetensors"}}', "names of files beside it"),
        ('{"weight_map": {"model.norm.weight": "absent.safetensors"}}', "absent.safetensors cannot be read"),
        ('{"weight_map": {"model', "not an index"),
        ("[]", "not an index"),
    ):
        index.write_text(text, encoding="utf-8")
        with pytest.raises(BadInput, match=words):
            load_safetensors(decoder, tmp_path)


def test_a_stage_reads_its_part_of_a_whole_checkpoint(tmp_path: Path) -> None:
    path, whole = saved("qwen2-tied-window", tmp_path), decoder_of("qwen2-tied-window")
    stage = build_decoder(facts("qwen2-tied-window"), CASES["qwen2-tied-window"], layers=(2,), first=False)
    load_safetensors(stage, path)
    for name, parameter in stage.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"model.norm.weight": None}, r"has no tensor model\.norm\.weight \[32\]"),
        ({"model.norm.weight": torch.ones(31)}, r"model\.norm\.weight is \[31\]; mixtral has \[32\]"),
        ({"model.norm.weight": torch.ones(32, dtype=torch.int8)}, "model.norm.weight is I8; .* not quantized"),
        ({"model.norm.bias": torch.ones(32)}, "model.norm.bias is no tensor of mixtral"),
        ({"model.layers.3.input_layernorm.weight": torch.ones(32)}, "layers.3.* is no tensor of mixtral"),
        ({"model.layers.0.block_sparse_moe.experts.4.w1.weight": torch.ones(48, 32)}, "experts.4.* is no tensor"),
        ({"model.layers.0.block_sparse_moe.experts.2.w1.weight": None}, "has no tensor .*experts.2.w1"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    tensors: dict[str, torch.Tensor | None], words: str, tmp_path: Path
) -> None:
    path = saved("mixtral", tmp_path)
    changed(path, **tensors)
    decoder, untouched = empty("mixtral"), empty("mixtral")
    with pytest.raises(BadInput, match=words):
        load_safetensors(decoder, path)
    assert all(torch.equal(untouched.get_parameter(name), value) for name, value in decoder.named_parameters())


@pytest.mark.parametrize("kept", [0, 4, 200, -100])
def test_a_damaged_file_is_refused(kept: int, tmp_path: Path) -> None:
    path = saved("llama", tmp_path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(BadInput, match="cannot be read as safetensors"):
        load_safetensors(empty("llama"), path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read as safetensors"):
        load_safetensors(empty("llama"), tmp_path)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = saved("llama", tmp_path)
    before = path.read_bytes()
    (tmp_path / "model.safetensors.unfinished").mkdir()
    with pytest.raises(BadInput, match="cannot be written"):
        save_safetensors(decoder_tensors(empty("llama")), path)
    assert path.read_bytes() == before
    with pytest.raises(BadInput, match="cannot be written"):
        save_safetensors(decoder_tensors(empty("llama")), tmp_path / "absent" / "model.safetensors")


def test_computable_buffers_and_second_copies_are_passed_over(tmp_path: Path) -> None:
    path = saved("llama", tmp_path)
    changed(path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    load_safetensors(empty("llama"), path)
    path = saved("qwen2-tied-window", tmp_path)
    changed(path, **{"lm_head.weight": load_file(path)["model.embed_tokens.weight"]})
    load_safetensors(empty("qwen2-tied-window"), path)
    changed(path, **{"lm_head.weight": torch.ones(96, 32)})
    with pytest.raises(BadInput, match=r"lm_head\.weight is not model\.embed_tokens\.weight"):
        load_safetensors(empty("qwen2-tied-window"), path)


def test_a_routers_correction_is_kept_beside_the_parameters(tmp_path: Path) -> None:
    path = saved("deepseek_v3", tmp_path)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    correction = torch.linspace(-3, 3, 8)
    changed(path, **{name: correction})
    decoder = empty("deepseek_v3")
    plain, tokens = decoder_of("deepseek_v3"), tokens_of("deepseek_v3")
    load_safetensors(decoder, path)
    with torch.no_grad():
        assert (decoder(tokens) - plain(tokens)).abs().max() > 1e-3
    assert torch.equal(decoder_tensors(decoder)[name], correction)
    assert name not in dict(decoder.named_parameters())


def test_layers_of_multi_token_prediction_are_passed_over(tmp_path: Path) -> None:
    config: dict[str, Any] = {**CASES["deepseek_v3"], "num_nextn_predict_layers": 1}
    model = model_from_config(config, name="with-mtp", source="")
    path = saved("deepseek_v3", tmp_path)
    changed(path, **{"model.layers.3.eh_proj.weight": torch.ones(32, 64)})
    load_safetensors(build_decoder(model, config), path)
    with pytest.raises(BadInput, match=r"eh_proj\.weight is no tensor"):
        load_safetensors(empty("deepseek_v3"), path)
