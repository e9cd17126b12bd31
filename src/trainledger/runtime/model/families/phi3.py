"""Phi-3 and Phi-4."""

from __future__ import annotations

from trainledger.facts.model import Model
from trainledger.facts.semantics import MlpRule, Semantics
from trainledger.runtime.model.config import Config
from trainledger.runtime.model.families.common import attentions, each_layer, rms, rope_values, rotary


def read(model: Model, config: Config) -> Semantics:
    """Llama's block with q, k, v in one matrix and gate and up in another; "su" and "yarn" mean longrope here."""
    config.ignore("full_attn_mod", "interpolate_factor")
    values = rope_values(config)
    if values["rope_type"] in ("su", "yarn"):
        values["rope_type"] = "longrope"
    values["original_max_position_embeddings"] = config.whole("original_max_position_embeddings", 4096)
    return Semantics(
        norm=rms(config, 1e-5),
        attention=attentions(model, qkv="rows", fused="qkv_proj"),
        rotary={"rotary": rotary(config, values, each_layer(model)[0].qk_head_dim, model)},
        mlp=MlpRule(kind="fused", activation=config.activation("silu", "hidden_act"), up="gate_up_proj"),
    )
