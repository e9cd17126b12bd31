"""Model keys changed with --set: those that nothing reads are refused, with the flag that was meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import run
from trainledger.errors import TrainledgerError
from trainledger.facts.model_load import load_model
from trainledger.facts.presets import preset_config


@pytest.mark.parametrize(
    ("key", "text", "knob"),
    [
        ("attention_dropout", "0.1", "leave it out"),
        ("torch_dtype", "bfloat16", "give --precision"),
        ("gradient_checkpointing", "true", "give --recompute"),
        ("max_length", "8192", "give --seq"),
    ],
)
def test_setting_a_key_that_nothing_reads_is_refused(key: str, text: str, knob: str) -> None:
    with pytest.raises(TrainledgerError) as caught:
        load_model("llama-3-8b", overrides={key: text})
    said = str(caught.value)
    assert f"--set {key}={text} would change nothing" in said
    assert said.endswith(knob)


def test_a_key_that_nothing_reads_may_be_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**preset_config("gpt2"), "attn_pdrop": 0.1}))
    assert load_model(str(path), overrides={"attn_pdrop": "null"}).num_layers == 12


def test_a_change_that_only_a_run_sees_is_shown_of_a_preset_too() -> None:
    shown = run("ledger", "llama-3-8b", "--gpus", "8", "--set", "rope_theta=1000000").out
    assert "no shape depends on it: rope_theta" in shown
