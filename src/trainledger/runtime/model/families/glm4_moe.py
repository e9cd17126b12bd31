"""GLM-4.5."""

from __future__ import annotations

import msgspec

from trainledger.facts.model import Model
from trainledger.facts.semantics import Semantics
from trainledger.runtime.model.config import Config
from trainledger.runtime.model.families.common import each_layer, llama_like
from trainledger.runtime.model.families.deepseek import sigmoid_experts


def read(model: Model, config: Config) -> Semantics:
    """Llama's block with rotary positions in half of each head and the router of DeepSeek-V3."""
    facts = each_layer(model)[0]
    plain = llama_like(model, config, fraction=0.5, eps=1e-5, qk_norm="head" if facts.qk_norm else "none")
    return msgspec.structs.replace(plain, moe=sigmoid_experts(model, config, scaling=1.0, groups=1, top_groups=1))
