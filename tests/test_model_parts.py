"""The decoder inside the config of a model with other parts: config.json:text_config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from command_line import answer, run
from trainledger.errors import BadInput
from trainledger.facts.model_load import load_model, load_with_config
from trainledger.facts.presets import preset_config

TEXT = {**preset_config("llama-3.2-1b"), "num_hidden_layers": 3}
WRAPPED: dict[str, Any] = {
    "model_type": "mllama",
    "text_config": TEXT,
    "vision_config": {"model_type": "seeing", "hidden_size": 8},
    "rope": {"theta": 1},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "wrapped.json"
    path.write_text(json.dumps(WRAPPED), encoding="utf-8")
    return path


def test_a_part_is_read_as_a_config_of_its_own(file: Path) -> None:
    config, model = load_with_config(f"{file}:text_config")
    assert config == TEXT
    assert model.total_params == load_model("llama-3.2-1b", overrides={"num_hidden_layers": "3"}).total_params
    assert model.name == "wrapped"
    assert model.notes[0] == "text_config of the config alone: no weights of other parts are counted"
    assert load_model(f"{file}:text_config", overrides={"num_hidden_layers": "2"}).num_layers == 2
    assert load_model(f"{file.parent}/../{file.parent.name}/wrapped.json:text_config").num_layers == 3


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("{file}", "give {file}:text_config (model_type 'llama') for the decoder alone"),
        ("{file}:audio_config", "{file} has no audio_config; give one of its parts, text_config, vision_config"),
        ("{file}:vision_config", "'seeing' is not a known model_type ({file}:vision_config)"),
        ("{file}.json:text_config", "{file}.json does not exist"),
        ("llama-3-8b:text_config", "preset llama-3-8b has no text_config; it is of one decoder, so give it by itself"),
        ("llama-3-8b:", "'llama-3-8b:' is not a known model"),
    ],
)
def test_what_is_no_part_is_refused(file: Path, name: str, words: str) -> None:
    with pytest.raises(BadInput) as caught:
        load_model(name.format(file=file))
    assert words.format(file=file) in str(caught.value)


def test_a_file_whose_name_has_a_colon_is_that_file(tmp_path: Path) -> None:
    path = tmp_path / "a:text_config"
    path.write_text(json.dumps(TEXT), encoding="utf-8")
    assert load_model(str(path)).num_layers == 3


def test_a_plan_file_names_a_part_of_a_config_beside_it(file: Path) -> None:
    plan = file.parent / "plan.toml"
    plan.write_text('model = "wrapped.json:text_config"\ngpus = 8\nzero = 3\n', encoding="utf-8")
    found = answer("ledger", str(plan))
    assert found["model"] == "wrapped"
    assert "text_config of the config alone" in next(
        n["message"] for n in found["notes"] if n["rule"] == "config-as-read"
    )
    assert run("model", f"{file}:text_config").code == 0
