"""Command R (cohere) and Command R7B (cohere2)."""

from __future__ import annotations

import msgspec

from trainledger.facts.model import Model
from trainledger.facts.semantics import BlockRule, ExitRule, MlpRule, Semantics
from trainledger.runtime.model.config import Config
from trainledger.runtime.model.families.common import attentions, each_layer, layer_norm, rope_values, rotary


def read(model: Model, config: Config) -> Semantics:
    """Attention and network in parallel behind one norm; in Cohere2 only layers with a window have positions."""
    config.ignore(
        "position_embedding_type",
        "use_embedding_sharing",
        "use_gated_activation",
        "use_parallel_block",
        "use_parallel_embedding",
        "layer_switch",
        "order_of_interleaved_layers",
        "rotary_embedding",
    )
    facts = each_layer(model)
    rules = attentions(model, qk_norm="head" if facts[0].qk_norm else "none")
    if model.family == "cohere2":
        rules = tuple(msgspec.structs.replace(rule, rotary=None if rule.window is None else "rotary") for rule in rules)
    values = rope_values(config, theta=500000.0 if model.family == "cohere" else 10000.0)
    turn = rotary(config, values, facts[0].qk_head_dim, model, interleaved=True, fp32=True)
    return Semantics(
        norm=layer_norm(config, "layer_norm_eps"),
        attention=rules,
        rotary={"rotary": turn},
        block=BlockRule(residual="parallel", before_network="input_layernorm"),
        mlp=MlpRule(activation=config.activation("silu", "hidden_act")),
        exit=ExitRule(multiplier=config.number("logit_scale", 0.0625)),
    )
