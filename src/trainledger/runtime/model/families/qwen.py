"""Qwen2, Qwen2-MoE, Qwen3 and Qwen3-MoE."""

from __future__ import annotations

import msgspec

from trainledger.facts.model import Model
from trainledger.facts.semantics import MlpRule, MoeRule, Semantics
from trainledger.runtime.model.config import Config
from trainledger.runtime.model.families.common import llama_like


def read(model: Model, config: Config) -> Semantics:
    """Llama's block; Qwen3 normalises each head of q and k; Qwen2-MoE gates its shared expert by one number."""
    config.ignore("qkv_bias", "attention_bias", "use_mrope", "max_window_layers")  # the shapes show the biases
    plain = llama_like(model, config, qk_norm="head" if model.family.startswith("qwen3") else "none")
    facts = next((block.moe for block in model.blocks if block.moe is not None), None)
    if facts is None:
        config.ignore("norm_topk_prob")
        return plain
    activation, shared = plain.mlp.activation, facts.shared_intermediate
    moe = MoeRule(
        top_k=facts.top_k,
        renormalise=config.flag("norm_topk_prob"),
        activation=activation,
        shared=MlpRule(path="shared_expert", activation=activation) if shared else None,
        shared_gate="shared_expert_gate" if shared else None,
    )
    return msgspec.structs.replace(plain, moe=moe)
