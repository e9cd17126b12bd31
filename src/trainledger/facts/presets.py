"""Models that come with the package: one config.json each, and the other names that people call them.

Each file keeps the keys of a published config that decide shapes, with `_source` saying where they were read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainledger.errors import UnknownName
from trainledger.facts.families import model_from_config
from trainledger.facts.model import Model

FOLDER = Path(__file__).parent.parent / "data" / "models"

# Only names whose config has the same shapes as the preset's: same layers, widths, heads and vocabulary.
_SAME_SHAPES: dict[str, tuple[str, ...]] = {
    "bloom-176b": ("bloom", "bigscience/bloom"),
    "bloom-560m": ("bigscience/bloom-560m",),
    "bloom-7b1": ("bigscience/bloom-7b1",),
    "command-r-plus": ("CohereForAI/c4ai-command-r-plus", "CohereLabs/c4ai-command-r-plus"),
    "deepseek-v2": ("deepseek-ai/DeepSeek-V2", "deepseek-ai/DeepSeek-V2-Chat"),
    "deepseek-v3": (
        "deepseek-r1",
        "deepseek-ai/DeepSeek-V3",
        "deepseek-ai/DeepSeek-V3-Base",
        "deepseek-ai/DeepSeek-R1",
    ),
    "falcon-180b": ("tiiuae/falcon-180B",),
    "falcon-7b": ("tiiuae/falcon-7b",),
    "gemma-2-27b": ("google/gemma-2-27b", "google/gemma-2-27b-it"),
    "gemma-2-2b": ("google/gemma-2-2b", "google/gemma-2-2b-it"),
    "gemma-2b": ("google/gemma-2b", "google/gemma-2b-it"),
    "gemma-3-1b": ("google/gemma-3-1b-pt", "google/gemma-3-1b-it"),
    "glm-4.5-air": ("zai-org/GLM-4.5-Air", "zai-org/GLM-4.5-Air-Base"),
    "gpt-neox-20b": ("EleutherAI/gpt-neox-20b",),
    "gpt-oss-20b": ("openai/gpt-oss-20b",),
    "gpt2": ("gpt2-small", "openai-community/gpt2"),
    "gpt2-large": ("openai-community/gpt2-large",),
    "gpt2-medium": ("openai-community/gpt2-medium",),
    "gpt3-175b": ("gpt-3", "gpt3", "gpt-3-175b"),
    "gpt3-1.3b": ("gpt-3-1.3b",),
    "gpt3-13b": ("gpt-3-13b",),
    "gpt3-6.7b": ("gpt-3-6.7b",),
    "llama-1-30b": ("llama-30b", "llama-33b", "huggyllama/llama-30b"),
    "llama-2-13b": ("llama2-13b", "meta-llama/Llama-2-13b-hf", "meta-llama/Llama-2-13b-chat-hf"),
    "llama-2-70b": ("llama2-70b", "meta-llama/Llama-2-70b-hf", "meta-llama/Llama-2-70b-chat-hf"),
    "llama-2-7b": ("llama2-7b", "llama-7b", "meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b-chat-hf"),
    "llama-3-70b": (
        "llama3-70b",
        "llama-3.1-70b",
        "llama-3.3-70b",
        "meta-llama/Meta-Llama-3-70B",
        "meta-llama/Meta-Llama-3-70B-Instruct",
        "meta-llama/Llama-3.1-70B",
        "meta-llama/Llama-3.1-70B-Instruct",
        "meta-llama/Meta-Llama-3.1-70B",
        "meta-llama/Llama-3.3-70B-Instruct",
    ),
    "llama-3-8b": (
        "llama3-8b",
        "llama-3.1-8b",
        "meta-llama/Meta-Llama-3-8B",
        "meta-llama/Meta-Llama-3-8B-Instruct",
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Meta-Llama-3.1-8B",
    ),
    "llama-3.1-405b": (
        "llama3-405b",
        "llama-3-405b",
        "meta-llama/Llama-3.1-405B",
        "meta-llama/Llama-3.1-405B-Instruct",
        "meta-llama/Meta-Llama-3.1-405B",
    ),
    "llama-3.2-1b": ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B-Instruct"),
    "llama-3.2-3b": ("meta-llama/Llama-3.2-3B", "meta-llama/Llama-3.2-3B-Instruct"),
    "llama-4-scout-text": ("llama-4-scout",),
    "mistral-7b-v0.1": ("mistral-7b", "mistralai/Mistral-7B-v0.1"),
    "mistral-7b-v0.3": ("mistralai/Mistral-7B-v0.3",),
    "mixtral-8x7b": ("mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
    "nemotron-h-56b": ("nvidia/Nemotron-H-56B-Base-8K",),
    "olmo-2-13b": ("allenai/OLMo-2-1124-13B",),
    "olmo-2-7b": ("allenai/OLMo-2-1124-7B",),
    "opt-1.3b": ("facebook/opt-1.3b",),
    "opt-125m": ("facebook/opt-125m",),
    "opt-13b": ("facebook/opt-13b",),
    "opt-30b": ("facebook/opt-30b",),
    "opt-6.7b": ("facebook/opt-6.7b",),
    "phi-3-medium": ("microsoft/Phi-3-medium-4k-instruct", "microsoft/Phi-3-medium-128k-instruct"),
    "phi-3-mini": ("microsoft/Phi-3-mini-4k-instruct", "microsoft/Phi-3-mini-128k-instruct"),
    "qwen1.5-72b": ("Qwen/Qwen1.5-72B",),
    "qwen2-0.5b": ("qwen2.5-0.5b", "Qwen/Qwen2-0.5B", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B-Instruct"),
    "qwen2.5-1.5b": ("qwen2-1.5b", "Qwen/Qwen2-1.5B", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-1.5B-Instruct"),
    "qwen2.5-14b": ("Qwen/Qwen2.5-14B", "Qwen/Qwen2.5-14B-Instruct"),
    "qwen2.5-32b": ("Qwen/Qwen2.5-32B", "Qwen/Qwen2.5-32B-Instruct"),
    "qwen2.5-72b": ("qwen2-72b", "Qwen/Qwen2-72B", "Qwen/Qwen2.5-72B", "Qwen/Qwen2.5-72B-Instruct"),
    "qwen2.5-7b": ("qwen2-7b", "Qwen/Qwen2-7B", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct"),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B-Base"),
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B", "Qwen/Qwen3-1.7B-Base"),
    "qwen3-14b": ("Qwen/Qwen3-14B", "Qwen/Qwen3-14B-Base"),
    "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-Base"),
    "qwen3-32b": ("Qwen/Qwen3-32B",),
    "qwen3-4b": ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B-Base"),
    "qwen3-8b": ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base"),
}

ALIASES: dict[str, str] = {other.lower(): preset for preset, others in _SAME_SHAPES.items() for other in others}
"""Other names of presets, in lower case: releases with the same shapes, and ids on the Hub."""


def preset_names() -> tuple[str, ...]:
    """Names of the models that come with the package, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def find_preset(name: str) -> str | None:
    """The preset that a name or an alias means, in any case; None when there is none.

    >>> find_preset("meta-llama/Meta-Llama-3-8B")
    'llama-3-8b'
    """
    wanted = ALIASES.get(name.lower(), name.lower())
    return wanted if wanted in preset_names() else None


def preset_config(name: str) -> dict[str, Any]:
    """The config of a preset, by its name or an alias."""
    found = find_preset(name)
    if found is None:
        raise UnknownName("preset model", name, (*preset_names(), *ALIASES))
    return json.loads((FOLDER / f"{found}.json").read_text(encoding="utf-8"))


def preset_source(config: dict[str, Any], name: str) -> str:
    """Where the shapes of a preset come from."""
    return f"preset {name}: {config.get('_source', 'no source')}"


def load_preset(name: str) -> Model:
    """The model that comes with the package under this name or alias.

    >>> load_preset("llama-3-8b").total_params
    8030261248
    """
    config = preset_config(name)
    found = find_preset(name) or name
    return model_from_config(config, name=found, source=preset_source(config, found))
