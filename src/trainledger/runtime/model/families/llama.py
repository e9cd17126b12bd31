"""Llama and Mistral."""

from __future__ import annotations

from trainledger.facts.model import Model
from trainledger.runtime.model.config import Config
from trainledger.runtime.model.families.common import llama_like
from trainledger.runtime.model.semantics import Semantics


def read(model: Model, config: Config) -> Semantics:
    """The plain block."""
    return llama_like(model, config)
