"""Build the configs of the families' oracle with transformers itself and freeze what they hold for the tests.

`tests/data/families_oracle.json` lists the cases, one a line: model_type, name, config. This script fills in the rest.
To add a case, add its line (a name that starts with "small" also gets names and shapes), and run by hand, in an
environment of its own:

    python3 -m venv ORACLE && ORACLE/bin/pip install torch==2.13.0 transformers==5.24.0
    ORACLE/bin/python scripts/family_oracle.py

`total` counts the distinct parameters of AutoModelForCausalLM on the meta device: a tied weight once, buffers not at
all. `tensors` are the names and shapes that `save_pretrained` writes, which are the names of the checkpoints on the
Hub, less the buffers; they stand in the order in which the model registers its parameters. `defaults` are the fields
of the config classes.
Nothing in the package imports this file.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from safetensors import safe_open
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

ORACLE = Path(__file__).parent.parent / "tests" / "data" / "families_oracle.json"

NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
"""Token ids that no vocabulary is too small for."""

GRANITE = {
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    "router.layer.weight": "router.weight",
}
"""What Granite's checkpoints call the stacks of experts and their router, and what its class does."""


def build(model_type: str, config: dict[str, Any], device: str) -> transformers.PreTrainedModel:
    """The causal language model of a config."""
    full = CONFIG_MAPPING[model_type].from_dict({**NO_TOKENS, **config})
    with torch.device(device):
        return AutoModelForCausalLM.from_config(full)


def count(model_type: str, config: dict[str, Any]) -> int:
    """Elements of the distinct parameters that are trained."""
    return sum(p.numel() for _, p in build(model_type, config, "meta").named_parameters() if p.requires_grad)


def rank(name: str, parameters: list[str]) -> tuple[int, int]:
    """Where a checkpoint name stands among the model's own names, which stack the experts and rename some modules."""
    own = name.replace("backbone.", "model.").replace("block_sparse_moe.", "mlp.").replace("embed_out.", "lm_head.")
    granite = name
    for theirs, here in GRANITE.items():
        granite = granite.replace(theirs, here)
    for same in (name, own, granite):
        if same in parameters:
            return parameters.index(same), 0
    stacked, _, last = re.sub(r"experts\.\d+\.", "experts.", own).removesuffix(".weight").rpartition(".")
    for part in ({"w2": "down_proj"}.get(last, last), "gate_up_proj"):
        if f"{stacked}.{part}" in parameters:
            return parameters.index(f"{stacked}.{part}"), int(last in ("up_proj", "w3"))
    raise AssertionError(f"{name} is no parameter of the model")


def tensors(model_type: str, config: dict[str, Any]) -> dict[str, list[int]]:
    """Names and shapes in the checkpoint, without buffers."""
    model = build(model_type, config, "cpu")
    parameters = [name for name, _ in model.named_parameters()]
    buffers = {name for name, _ in model.named_buffers()}
    buffers |= {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    last = {name.split(".")[-1] for name in buffers} - {
        name.split(".")[-1] for name in parameters if name not in buffers
    }
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safe_open(Path(folder) / "model.safetensors", "pt") as file:
            shapes = {name: list(file.get_slice(name).get_shape()) for name in list(file.keys())}
    kept = [name for name in shapes if name not in buffers and name.split(".")[-1] not in last]
    return {name: shapes[name] for name in sorted(kept, key=lambda name: (rank(name, parameters), name))}


def fill(case: dict[str, Any]) -> dict[str, Any]:
    """The case with its total, and with its tensors if it is small."""
    model_type, config = case["type"], case["config"]
    out = {"type": model_type, "case": case["case"], "config": config, "total": count(model_type, config)}
    return {**out, "tensors": tensors(model_type, config)} if case["case"].startswith("small") else out


def class_defaults(model_type: str) -> dict[str, Any]:
    """What each field of the config class is before the class derives anything."""
    fields = CONFIG_MAPPING[model_type].__dataclass_fields__.values()
    plain = {field.name: field.default for field in fields}
    return {name: value for name, value in plain.items() if value is None or type(value) in (int, bool, str, float)}


def main() -> None:
    """Read the cases, build each, and write the oracle again."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    cases = [fill(case) for case in json.loads(ORACLE.read_text(encoding="utf-8"))["cases"]]
    release = {"transformers": transformers.__version__, "torch": torch.__version__}
    defaults = {name: class_defaults(name) for name in sorted({case["type"] for case in cases})}
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    text = f'{{"made_with":{json.dumps(release)},\n"defaults":{json.dumps(defaults)},\n"cases":[\n{lines}\n]}}\n'
    ORACLE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
