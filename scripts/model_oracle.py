"""Compare the logits of the runtime's decoders with those of transformers, on small random models of every family.

Run by hand, in an environment of its own:

    python3 -m venv ORACLE && ORACLE/bin/pip install torch==2.13.0 transformers==5.24.0 msgspec numpy
    PYTHONPATH=src ORACLE/bin/python scripts/model_oracle.py [FAMILY ...]

transformers builds each model, spreads its weights, and writes it with `save_pretrained`; the runtime reads that
checkpoint with its own loader. Logits and the gradient of every parameter of a loss must agree. Nothing in the package
imports this file.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from torch.nn import functional
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from trainledger.facts.families import model_from_config
from trainledger.runtime.model import build_decoder, load_safetensors

TOLERANCE = 1e-4
"""Largest difference of a logit or gradient, over their size: fp32 sums in another order."""

LENGTH = 24
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

CASES = Path(__file__).parent.parent / "tests" / "data" / "model_cases.json"
"""Small configs, which the tests use too: a list of objects with `name` and `config`."""


def spread(model: torch.nn.Module) -> None:
    """Values far from their start, so that norms, biases, sinks and routers matter: a fault must move a logit."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter.add_(noise * 0.3)
            else:
                parameter.copy_(noise * (0.3 if "embed" in name or "wte" in name else 0.15))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)


def oracle(config: dict[str, Any], folder: str) -> transformers.PreTrainedModel:
    """The model of transformers, its checkpoint written to `folder`."""
    full = CONFIG_MAPPING[config["model_type"]].from_dict({**NO_TOKENS, **config})
    # soft caps and sinks exist in eager attention alone; Falcon's eager attention adds ALiBi twice
    kind = "sdpa" if config["model_type"] == "falcon" else "eager"
    model = AutoModelForCausalLM.from_config(full, attn_implementation=kind, dtype=torch.float32).eval()
    spread(model)
    model.save_pretrained(folder)
    return model


def differences(config: dict[str, Any]) -> tuple[float, float]:
    """Largest difference of a logit and of a gradient, over their spread, after one has read the other's checkpoint.

    Gradients travel as weights do: they take the place of the weights, are saved, and are loaded into a second decoder.
    """
    facts = model_from_config(config, name=config["model_type"], source="")
    decoder, gradients = build_decoder(facts, config), build_decoder(facts, config)
    tokens = torch.randint(0, facts.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as folder:
        model = oracle(config, folder)
        load_safetensors(decoder, folder)
        theirs, ours = model(tokens, use_cache=False).logits, decoder(tokens)
        for logits in (theirs, ours):
            functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        model.save_pretrained(folder)
        load_safetensors(gradients, folder)
    logits = float((ours - theirs).abs().max() / max(1.0, float(theirs.std())))
    pairs = zip(decoder.parameters(), gradients.parameters(), strict=True)
    return logits, max(_relative(mine.grad, other) for mine, other in pairs)


def _relative(mine: torch.Tensor | None, other: torch.Tensor) -> float:
    assert mine is not None, "every parameter takes part in the loss"
    return float((mine - other).abs().max() / max(1e-3, float(other.abs().max())))


def main() -> None:
    """Every case, or those whose name starts with a word given."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    failed = 0
    for case in json.loads(CASES.read_text(encoding="utf-8")):
        if sys.argv[1:] and not case["name"].startswith(tuple(sys.argv[1:])):
            continue
        logits, gradient = differences(case["config"])
        wrong = max(logits, gradient) > TOLERANCE
        failed += wrong
        print(f"{'FAIL' if wrong else 'ok  '} {case['name']:32} logits {logits:.1e}  gradients {gradient:.1e}")
    if failed:
        raise SystemExit(f"{failed} cases differ by more than {TOLERANCE}")


if __name__ == "__main__":
    main()
