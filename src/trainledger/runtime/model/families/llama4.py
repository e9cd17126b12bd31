"""Llama 4, the text decoder."""

from __future__ import annotations

import msgspec

from trainledger.facts.model import Model
from trainledger.facts.semantics import AttentionRule, MlpRule, MoeRule, Semantics
from trainledger.runtime.model.config import Config
from trainledger.runtime.model.families.common import each_layer, llama_like, rope_values, rotary


def read(model: Model, config: Config) -> Semantics:
    """Layers with rotary positions see their own chunk; those without see all and may sharpen with the position."""
    plain = llama_like(model, config, theta=500000.0, eps=1e-5, chunked=True)
    turn = rotary(
        config,
        rope_values(config, theta=500000.0),
        each_layer(model)[0].qk_head_dim,
        model,
        interleaved=True,
        fp32=True,
    )
    config.ignore("for_llm_compressor")
    activation = plain.mlp.activation
    facts = next((block.moe for block in model.blocks if block.moe is not None), None)
    moe = None
    if facts is not None:
        moe = MoeRule(
            path="feed_forward",
            router="sigmoid_top",
            gate="router",
            top_k=facts.top_k,
            scale_input=True,
            activation=activation,
            stacked="halves",
            shared=MlpRule(path="shared_expert", activation=activation),
        )
    return msgspec.structs.replace(
        plain,
        attention=_attention(model, config, plain),
        rotary={"rotary": turn},
        mlp=MlpRule(path="feed_forward", activation=activation),
        moe=moe,
    )


def _attention(model: Model, config: Config, plain: Semantics) -> tuple[AttentionRule, ...]:
    turned = config.get("no_rope_layers")
    if not isinstance(turned, list) or not turned:
        every = config.whole("no_rope_layer_interval", 4)
        turned = [(layer + 1) % every != 0 for layer in range(model.num_layers)]
    tuned = config.flag("attn_temperature_tuning", default=True)
    temperature = (config.number("floor_scale", 8192), config.number("attn_scale", 0.1))
    facts = each_layer(model)
    return tuple(
        msgspec.structs.replace(
            rule,
            rotary="rotary" if turned[layer] else None,
            qk_norm="after_rotary" if facts[layer].qk_norm else "none",
            after_eps=plain.norm.eps,
            temperature=temperature if tuned and not turned[layer] else None,
        )
        for layer, rule in enumerate(plain.attention)
    )
