"""From a config.json to the rules of its forward pass; a key that could change it and is not understood is refused."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from trainledger.errors import Refused
from trainledger.facts.families import family_for
from trainledger.facts.families.keys import IDLE, names
from trainledger.facts.model import Model
from trainledger.facts.semantics import MoeRule, RotaryRule, Semantics
from trainledger.runtime.model.config import Config

SPREAD = 0.02
"""`initializer_range` of most config classes of transformers 5.24.0."""

READERS: dict[str, str] = {
    "bloom": "bloom",
    "cohere": "cohere",
    "cohere2": "cohere",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "falcon": "falcon",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    "glm4_moe": "glm4_moe",
    "gpt2": "gpt2",
    "gpt_neox": "gpt_neox",
    "gpt_oss": "gpt_oss",
    "gptj": "gptj",
    "granite": "llama",
    "llama": "llama",
    "llama4_text": "llama4",
    "mistral": "llama",
    "mixtral": "mixtral",
    "olmo": "olmo",
    "olmo2": "olmo",
    "olmo3": "olmo",
    "opt": "opt",
    "phi": "phi",
    "phi3": "phi3",
    "qwen2": "qwen",
    "qwen2_moe": "qwen",
    "qwen3": "qwen",
    "qwen3_moe": "qwen",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}
"""Which file of `families/` reads a family's rules."""

ROUTERS = names("n_group topk_group topk_method norm_topk_prob routed_scaling_factor scoring_func")
"""Keys that change nothing where no layer routes tokens."""


def read_semantics(model: Model, config: Mapping[str, Any]) -> Semantics:
    """The rules of a model's forward pass, from the config that it was read from."""
    if model.params_only or any(block.attention is None for block in model.blocks):
        raise Refused(
            "runtime-family",
            f"{model.name} is of family {model.family}, and only decoders whose every layer has attention can be run; "
            f"choose a model of {', '.join(sorted(READERS))}",
        )
    if model.family not in READERS:
        raise Refused(
            "runtime-family",
            f"{model.name} is of family {model.family}, whose forward pass is not written; "
            f"choose a model of {', '.join(sorted(READERS))}",
        )
    settings = Config(model.name, config)
    module = importlib.import_module(f"trainledger.runtime.model.families.{READERS[model.family]}")
    semantics: Semantics = module.read(model, settings)
    _refuse_unknown(model, config, settings)
    for rule in semantics.rotary.values():
        _refuse_turning(model, rule)
    if semantics.moe is not None:
        _refuse_choosing(model, semantics.moe)
    read_spread(model, config)
    return semantics


def read_spread(model: Model, config: Mapping[str, Any]) -> float:
    """The standard deviation that matrices and tables of a new model start with: `initializer_range`."""
    spread = Config(model.name, config).number("initializer_range", SPREAD)
    if spread <= 0:
        raise Refused(
            "runtime-config",
            f"{model.name}: initializer_range is {spread}, and must be above 0, for a model that starts at zero learns "
            "nothing; correct the config",
        )
    return spread


def _refuse_turning(model: Model, rule: RotaryRule) -> None:
    """Positions turn pairs of features, by powers of theta."""
    if rule.dim % 2:
        raise Refused(
            "runtime-config",
            f"{model.name}: {rule.dim} features of a head turn with the position, and they turn in pairs; change the "
            "size of a head to an even number (head_dim, or hidden size over heads)",
        )
    factor = rule.scaling.factor if rule.scaling is not None else 1.0
    for key, value in (("rope_theta", rule.theta), ("the factor of rope_scaling", factor)):
        if value <= 0:
            raise Refused("runtime-config", f"{model.name}: {key} is {value}, and must be above 0; correct the config")


def _refuse_choosing(model: Model, rule: MoeRule) -> None:
    """The experts of a token come from its best groups."""
    experts = min(block.moe.experts for block in model.blocks if block.moe is not None)
    each, rest = divmod(experts, rule.groups) if rule.groups > 0 else (0, 1)
    enough = 1 <= rule.top_groups <= rule.groups and rule.top_k <= rule.top_groups * each
    if rule.groups != 1 and (rest or not enough or (rule.group_of_two and each < 2)):
        raise Refused(
            "runtime-config",
            f"{model.name}: a token takes {rule.top_k} experts of the best topk_group={rule.top_groups} of "
            f"n_group={rule.groups} groups, and {experts} experts do not make such groups; correct the config",
        )


def _refuse_unknown(model: Model, config: Mapping[str, Any], settings: Config) -> None:
    family = family_for(config, model.name)
    known = family.read_keys | family.fixed_keys.keys() | settings.seen | IDLE
    if all(block.moe is None for block in model.blocks):
        known |= ROUTERS
    for key, value in config.items():
        if key in known or key.startswith("_") or value in (None, False, 0, "", [], {}):
            continue
        raise Refused(
            "runtime-config",
            f"{model.name}: the config's {key} is {value!r}, which could change the forward pass and is not "
            f"understood for family {model.family}; remove it with --set {key}=null",
        )
