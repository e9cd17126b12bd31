"""Phi-1, Phi-1.5 and Phi-2."""

from __future__ import annotations

from trainledger.facts.model import Model
from trainledger.facts.semantics import BlockRule, ExitRule, MlpRule, Semantics
from trainledger.runtime.model.config import Config
from trainledger.runtime.model.families.common import attentions, each_layer, layer_norm, rope_values, rotary


def read(model: Model, config: Config) -> Semantics:
    """Attention and network in parallel behind one LayerNorm; rotary positions in half of each head."""
    config.ignore("flash_rotary", "fused_dense")
    facts = each_layer(model)[0]
    values = rope_values(config, fraction=0.5)
    return Semantics(
        norm=layer_norm(config, "layer_norm_eps"),
        attention=attentions(
            model,
            out="dense",
            qk_norm="head" if facts.qk_norm else "none",
            q_norm="q_layernorm",
            k_norm="k_layernorm",
        ),
        rotary={"rotary": rotary(config, values, facts.qk_head_dim, model)},
        block=BlockRule(residual="parallel", before_network="input_layernorm"),
        mlp=MlpRule(kind="plain", activation=config.activation("gelu_new", "hidden_act"), up="fc1", down="fc2"),
        exit=ExitRule(norm="model.final_layernorm"),
    )
