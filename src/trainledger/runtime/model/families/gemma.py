"""Gemma, Gemma 2 and Gemma 3 (text)."""

from __future__ import annotations

import math

import msgspec

from trainledger.facts.model import Model
from trainledger.facts.semantics import (
    AttentionRule,
    BlockRule,
    EntryRule,
    ExitRule,
    MlpRule,
    RotaryRule,
    Semantics,
)
from trainledger.runtime.model.config import Config
from trainledger.runtime.model.families.common import attentions, each_layer, rms, rope_values, rotary


def read(model: Model, config: Config) -> Semantics:
    """Norm weights are offsets from one, the embedding is scaled by the root of the hidden size.

    Gemma 2 and 3 normalise before and after attention and network, scale scores by a key of the config, and may cap
    scores and logits.
    """
    first = model.family == "gemma"
    return Semantics(
        norm=msgspec.structs.replace(rms(config), plus_one=True),
        attention=attentions(model) if first else _attention(model, config),
        rotary=_tables(model, config),
        block=BlockRule() if first else _FOUR,
        mlp=MlpRule(activation=_activation(model, config)),
        entry=EntryRule(multiplier=math.sqrt(model.hidden_size), rounded=True),
        exit=ExitRule() if first else _exit(model, config),
    )


_FOUR = BlockRule(
    after_attention="post_attention_layernorm",
    before_network="pre_feedforward_layernorm",
    after_network="post_feedforward_layernorm",
)


def _activation(model: Model, config: Config) -> str:
    """Gemma reads hidden_act and takes "gelu" for the tanh form; its successors read hidden_activation."""
    keys = ("hidden_act", "hidden_activation")
    config.ignore(*keys)
    found = config.activation("gelu_pytorch_tanh", keys[0] if model.family == "gemma" else keys[1])
    return "gelu_pytorch_tanh" if found == "gelu" and model.family == "gemma" else found


def _attention(model: Model, config: Config) -> tuple[AttentionRule, ...]:
    third = model.family == "gemma3_text"
    config.ignore("sliding_window_size", "mm_tokens_per_image")
    cap = config.maybe("attn_logit_softcapping")
    if third:
        cap = None  # Gemma3Attention reads the key and hands it to no kernel
    elif "attn_logit_softcapping" not in config.values:
        cap = 50.0
    plain = attentions(
        model,
        scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        softcap=cap,
        qk_norm="head" if third else "none",
    )
    if not third:
        return plain
    return tuple(
        msgspec.structs.replace(rule, rotary="full" if word == "full_attention" else "sliding")
        for rule, word in zip(plain, _words(model, config), strict=True)
    )


def _words(model: Model, config: Config) -> list[str]:
    """The kind of each layer: as the config lists them, or full in every so-manieth layer."""
    given = config.get("layer_types")
    if isinstance(given, list):
        return [str(word) for word in given]
    every = config.whole("sliding_window_pattern", config.whole("_sliding_window_pattern", 6))
    return ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(model.num_layers)]


def _tables(model: Model, config: Config) -> dict[str, RotaryRule]:
    head_dim = each_layer(model)[0].qk_head_dim
    if model.family != "gemma3_text":
        return {"rotary": rotary(config, rope_values(config), head_dim, model)}
    full = rope_values(config, theta=1e6, label="full_attention")
    near = rope_values(config, theta_key="rope_local_base_freq", label="sliding_attention", older=False)
    return {"full": rotary(config, full, head_dim, model), "sliding": rotary(config, near, head_dim, model)}


def _exit(model: Model, config: Config) -> ExitRule:
    """Logits are capped: at 30 in a Gemma 2 whose config does not say."""
    key = "final_logit_softcapping"
    cap = config.maybe(key)
    if key not in config.values and model.family == "gemma2":
        cap = 30.0
    return ExitRule(softcap=cap)
