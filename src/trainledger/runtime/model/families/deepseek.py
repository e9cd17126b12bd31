"""DeepSeek-V2 and V3 (Kimi K2 is V3): latent attention, experts chosen within groups beside shared ones."""

from __future__ import annotations

import msgspec

from trainledger.facts.model import Model, Moe
from trainledger.facts.semantics import MlpRule, MoeRule, NormRule, Semantics
from trainledger.runtime.model.config import Config
from trainledger.runtime.model.families.common import (
    attention_of,
    each_layer,
    mscale,
    rms,
    rope_values,
    rotary,
)


def read(model: Model, config: Config) -> Semantics:
    """Dense layers first, then routed ones."""
    config.ignore("num_key_value_heads", "head_dim", "qk_head_dim")  # follow from the shapes
    facts = each_layer(model)[0]
    values = rope_values(config)
    interleaved = model.family == "deepseek_v2" or config.flag("rope_interleave", default=True)
    turn = rotary(config, values, facts.rope_head_dim, model, interleaved=interleaved)
    turn = msgspec.structs.replace(turn, fp32=model.family == "deepseek_v2")
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
        rotary={"rotary": turn},
        mlp=MlpRule(activation=config.activation("silu", "hidden_act")),
        moe=_experts(model, config),
    )


def _experts(model: Model, config: Config) -> MoeRule | None:
    if model.family != "deepseek_v2":
        return sigmoid_experts(model, config, scaling=2.5, groups=8, top_groups=4)
    facts = _facts(model)
    return None if facts is None else _complete(facts, config, _softmax(facts, config))


def _facts(model: Model) -> Moe | None:
    return next((block.moe for block in model.blocks if block.moe is not None), None)


def _complete(facts: Moe, config: Config, rule: MoeRule) -> MoeRule:
    """The rule with what every DeepSeek router shares."""
    config.ignore("num_local_experts", "num_experts")
    activation = config.activation("silu", "hidden_act")
    shared = MlpRule(path="shared_experts", activation=activation) if facts.shared_intermediate else None
    return msgspec.structs.replace(rule, fp32=True, activation=activation, shared=shared)


def _softmax(facts: Moe, config: Config) -> MoeRule:
    """V2: groups count as their best expert; DeepseekV2TopkRouter never divides by the sum, whatever the config."""
    config.ignore("norm_topk_prob")
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


def sigmoid_experts(model: Model, config: Config, *, scaling: float, groups: int, top_groups: int) -> MoeRule | None:
    """V3, with the defaults of a config class: groups count as the sum of their best two experts."""
    facts = _facts(model)
    if facts is None:
        return None
    config.word("scoring_func", "sigmoid", ("sigmoid",))
    config.word("topk_method", "noaux_tc", ("noaux_tc",))
    rule = MoeRule(
        router="sigmoid",
        top_k=facts.top_k,
        renormalise=config.flag("norm_topk_prob", default=True),
        floor=1e-20,
        scaling=config.number("routed_scaling_factor", scaling),
        groups=config.whole("n_group", groups),
        top_groups=config.whole("topk_group", top_groups),
        group_of_two=True,
    )
    return _complete(facts, config, rule)
