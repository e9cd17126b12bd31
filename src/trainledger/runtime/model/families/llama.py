"""Llama, Mistral and Granite."""

from __future__ import annotations

import msgspec

from trainledger.facts.model import Model
from trainledger.facts.semantics import BlockRule, EntryRule, ExitRule, Semantics
from trainledger.runtime.model.config import Config
from trainledger.runtime.model.families.common import llama_like


def read(model: Model, config: Config) -> Semantics:
    """The plain block; Granite multiplies embedding, scores, residual adds and logits by constants."""
    if model.family != "granite":
        return llama_like(model, config)
    plain = llama_like(model, config, scale=config.number("attention_multiplier", 1.0))
    return msgspec.structs.replace(
        plain,
        block=BlockRule(multiplier=config.number("residual_multiplier", 1.0)),
        entry=EntryRule(multiplier=config.number("embedding_multiplier", 1.0)),
        exit=ExitRule(multiplier=1.0 / config.number("logits_scaling", 1.0)),
    )
