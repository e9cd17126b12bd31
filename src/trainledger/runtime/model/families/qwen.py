"""Qwen2 and Qwen3."""

from __future__ import annotations

from trainledger.facts.model import Model
from trainledger.runtime.model.config import Config
from trainledger.runtime.model.families.common import llama_like
from trainledger.runtime.model.semantics import Semantics


def read(model: Model, config: Config) -> Semantics:
    """Llama's block; Qwen3 normalises each head of q and k."""
    for key in ("qkv_bias", "attention_bias"):
        config.get(key)  # the biases are there whatever these say: the ledger's tensors show them
    return llama_like(model, config, qk_norm="head" if model.family.startswith("qwen3") else "none")
