"""OLMo, OLMo 2 and OLMo 3."""

from __future__ import annotations

import msgspec

from trainledger.facts.model import Model
from trainledger.facts.semantics import BlockRule, MlpRule, NormRule, RotaryRule, Semantics
from trainledger.runtime.model.config import Config
from trainledger.runtime.model.families.common import attentions, each_layer, rms, rope_values, rotary


def read(model: Model, config: Config) -> Semantics:
    """OLMo normalises without weights; its successors normalise what attention and network give, and all of q and k."""
    first = model.family == "olmo"
    if not first:
        config.ignore("clip_qkv")  # Olmo2Attention does not clip
    clip = config.maybe("clip_qkv") if first else None
    rules = attentions(model, clip=clip, qk_norm="none" if first else "wide")
    if model.family == "olmo3":
        rules = tuple(
            msgspec.structs.replace(rule, rotary="full" if word == "full_attention" else "sliding")
            for rule, word in zip(rules, _words(model, config), strict=True)
        )
    return Semantics(
        norm=NormRule(kind="layer", eps=1e-5) if first else rms(config, 1e-5),
        attention=rules,
        rotary=_tables(model, config),
        block=BlockRule() if first else _AFTER,
        mlp=MlpRule(activation=config.activation("silu", "hidden_act")),
    )


_AFTER = BlockRule(
    before_attention="",
    after_attention="post_attention_layernorm",
    before_network="",
    after_network="post_feedforward_layernorm",
)


def _words(model: Model, config: Config) -> list[str]:
    """The kind of each layer: as the config lists them, or full in every fourth."""
    given = config.get("layer_types")
    if isinstance(given, list):
        return [str(word) for word in given]
    return ["sliding_attention" if (layer + 1) % 4 else "full_attention" for layer in range(model.num_layers)]


def _tables(model: Model, config: Config) -> dict[str, RotaryRule]:
    """Olmo3Config gives the config's rope_theta and rope_scaling to full layers only; sliding ones keep 500000."""
    head_dim = each_layer(model)[0].qk_head_dim
    if model.family != "olmo3":
        return {"rotary": rotary(config, rope_values(config), head_dim, model, fp32=True)}
    full = rope_values(config, theta=500000.0, label="full_attention")
    near = rope_values(config, theta=500000.0, theta_key="", label="sliding_attention", older=False)
    return {
        "full": rotary(config, full, head_dim, model, fp32=True),
        "sliding": rotary(config, near, head_dim, model, fp32=True),
    }
