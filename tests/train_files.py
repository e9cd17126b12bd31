"""A small model, a text and a CONFIG that the tests of training share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

TEXT = "".join(f"{number} and {number + 1} are {2 * number + 1}, which is odd.\n" for number in range(400))

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 256,
}

PLAN: dict[str, object] = {
    "model": "llama-3-8b",
    "set": [f"{key}={value}" for key, value in SIZES.items()],
    "seq": 32,
    "gbs": 4,
    "dp": 2,
    "zero": 3,
}
DATA: dict[str, object] = {"text": ["text.txt"], "held-out": 0.1}
RUN: dict[str, object] = {
    "steps": 6,
    "learning-rate": 3e-3,
    "eval-every": 3,
    "eval-sequences": 5,
    "checkpoint-every": 2,
}


def config(
    folder: Path, plan: Mapping[str, object] = {}, data: Mapping[str, object] = {}, run: Mapping[str, object] = {}
) -> str:
    """The path of a CONFIG, with these values in the place of those above; its text is beside it."""
    (folder / "text.txt").write_text(TEXT)
    path = folder / "tiny.toml"
    tables = [_lines({**PLAN, **plan}), "[data]", _lines({**DATA, **data}), "[run]"]
    path.write_text("\n".join([*tables, _lines({**RUN, "out": str(folder / "run"), **run})]))
    return str(path)


def _lines(values: Mapping[str, object]) -> str:
    return "\n".join(f"{key} = {_toml(value)}" for key, value in values.items())


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
