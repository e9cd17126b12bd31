"""DeepSeek-V2 and V3 (Kimi K2 is V3): latent attention, experts chosen within groups beside shared ones."""

from __future__ import annotations

import msgspec

from trainledger.facts.model import Model, Moe
from trainledger.runtime.model.config import Config
from trainledger.runtime.model.families.common import (
    attention_of,
    each_layer,
    mscale,
    rms,
    rope_values,
    rotary,
)
from trainledger.runtime.model.semantics import MlpRule, MoeRule, NormRule, RotaryRule, Semantics


def read(model: Model, config: Config) -> Semantics:
    """Dense layers first, then routed ones."""
    for key in ("num_key_value_heads", "head_dim", "qk_head_dim", "rope_interleave"):
        config.get(key)  # follow from the shapes
    facts = each_layer(model)[0]
    values = rope_values(config)
    turn = rotary(config, values, facts.rope_head_dim, model, interleaved=True)
    scale = facts.qk_head_dim**-0.5
    if values["rope_type"] != "default" and values.get("mscale_all_dim"):
        scale *= mscale(float(values["factor"]), float(values["mscale_all_dim"])) ** 2
    rule = attention_of(
        facts,
        kind="mla",
        q="q_b_proj" if facts.q_lora_rank else "q_proj",
        scale=scale,
        nope=facts.qk_head_dim - facts.rope_head_dim,
        rope=facts.rope_head_dim,
        value=facts.v_head_dim,
    )
    return Semantics(
        norm=rms(config),
        latent_norm=NormRule(eps=1e-6),  # the norms inside MLA are built without the config's epsilon
        attention=(rule,) * model.num_layers,
        rotary={"rotary": _turn(model, config, turn)},
        mlp=MlpRule(activation=config.activation("silu", "hidden_act")),
        moe=_experts(model, config),
    )


def _turn(model: Model, config: Config, turn: RotaryRule) -> RotaryRule:
    """V3 can keep its rotary features in halves."""
    if model.family == "deepseek_v3" and not config.flag("rope_interleave", default=True):
        return msgspec.structs.replace(turn, interleaved=False)
    return turn


def _experts(model: Model, config: Config) -> MoeRule | None:
    facts = next((block.moe for block in model.blocks if block.moe is not None), None)
    if facts is None:
        return None
    read_router = _sigmoid if model.family == "deepseek_v3" else _softmax
    activation = config.activation("silu", "hidden_act")
    shared = MlpRule(path="shared_experts", activation=activation) if facts.shared_intermediate else None
    return msgspec.structs.replace(read_router(facts, config), fp32=True, activation=activation, shared=shared)


def _softmax(facts: Moe, config: Config) -> MoeRule:
    """V2: groups count as their best expert; DeepseekV2TopkRouter never divides by the sum, whatever the config."""
    config.get("norm_topk_prob")
    config.word("scoring_func", "softmax", ("softmax",))
    method = config.word("topk_method", "greedy", ("greedy", "group_limited_greedy"))
    groups, top_groups = config.whole("n_group", 1), config.whole("topk_group", 1)
    limited = method == "group_limited_greedy"
    return MoeRule(
        top_k=facts.top_k,
        scaling=config.number("routed_scaling_factor", 1.0),
        groups=groups if limited else 1,
        top_groups=top_groups if limited else 1,
    )


def _sigmoid(facts: Moe, config: Config) -> MoeRule:
    """V3: groups count as the sum of their best two experts."""
    config.word("scoring_func", "sigmoid", ("sigmoid",))
    config.word("topk_method", "noaux_tc", ("noaux_tc",))
    return MoeRule(
        router="sigmoid",
        top_k=facts.top_k,
        renormalise=config.flag("norm_topk_prob", default=True),
        floor=1e-20,
        scaling=config.number("routed_scaling_factor", 2.5),
        groups=config.whole("n_group", 8),
        top_groups=config.whole("topk_group", 4),
        group_of_two=True,
    )
