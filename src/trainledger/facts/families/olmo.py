"""OLMo, OLMo 2, OLMo 3 and OLMoE.

OLMo normalises without parameters. OLMo 2 and 3 normalise what attention and network give back, not what they take,
and have RMSNorms over all heads of q and of k, which TP cuts with the heads. OLMo 3 slides in three layers of four.
OLMoE has those norms of q and k too, but normalises what attention and routed experts take.
"""

from __future__ import annotations

from trainledger.facts.families.common import (
    DECODER_KEYS,
    attention,
    blocks_of,
    gated_mlp,
    label,
    norm,
    read_heads,
    stack,
    wide_norms,
    windows,
)
from trainledger.facts.families.experts import check_top_k, router
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, names, without
from trainledger.facts.model import Block, Mlp, Moe


def _build(values: Values, kinds: tuple[int | None, ...], *, post_norm: bool) -> Parts:
    heads = read_heads(values)
    hidden, width = heads.hidden, values.dim("intermediate_size")
    bias = values.flag("attention_bias")

    def block(window: int | None, at: tuple[int, ...]) -> Block:
        return Block(
            kind=label("dense", window),
            layers=at,
            tensors=(
                *attention("self_attn", heads, qkv_bias=bias, out_bias=bias),
                *(wide_norms(heads) if post_norm else ()),
                *gated_mlp("mlp", hidden, width),
                *(norm("post_attention_layernorm", hidden) if post_norm else ()),
                *(norm("post_feedforward_layernorm", hidden) if post_norm else ()),
            ),
            norms=2,
            attention=heads.attention(window=window, qk_norm=post_norm),
            mlp=Mlp(intermediate=width, gated=True),
            keeps_end=post_norm,
        )

    return stack(values, blocks_of(kinds, block), last=None if post_norm else ())


def _olmo(values: Values) -> Parts:
    return _build(values, (None,) * values.dim("num_hidden_layers"), post_norm=False)


def _olmo2(values: Values) -> Parts:
    return _build(values, (None,) * values.dim("num_hidden_layers"), post_norm=True)


def _olmo3(values: Values) -> Parts:
    layers = values.dim("num_hidden_layers")
    return _build(values, windows(values, layers, lambda index: (index + 1) % 4 != 0), post_norm=True)


def _olmoe(values: Values) -> Parts:
    heads = read_heads(values)
    hidden, width, experts = heads.hidden, values.dim("intermediate_size"), values.dim("num_experts")
    bias, top_k = values.flag("attention_bias"), check_top_k(values, experts, "num_experts_per_tok")

    def block(_kind: str, at: tuple[int, ...]) -> Block:
        return Block(
            kind="moe",
            layers=at,
            tensors=(
                *attention("self_attn", heads, qkv_bias=bias, out_bias=bias),
                *wide_norms(heads),
                *router("mlp.gate", experts, hidden),
                *gated_mlp("mlp.experts.{e}", hidden, width, role="expert", copies=experts),
                *norm("input_layernorm", hidden),
                *norm("post_attention_layernorm", hidden),
            ),
            norms=2,
            attention=heads.attention(qk_norm=True),
            moe=Moe(experts=experts, top_k=top_k, intermediate=width, gated=True),
        )

    return stack(values, blocks_of(["moe"] * values.dim("num_hidden_layers"), block))


_KEYS = keys(DECODER_KEYS, vocab_size=50304, attention_bias=Key(False, "flag"))

_FIXED: dict[str, tuple[object, ...]] = {"mlp_bias": (False,)}

FAMILIES = (
    Family(
        name="olmo",
        config_class="OlmoConfig",
        architectures=("OlmoForCausalLM",),
        keys=_KEYS,
        build=_olmo,
        ignored=names("clip_qkv"),
        fixed=_FIXED,
    ),
    Family(
        name="olmo2",
        config_class="Olmo2Config",
        architectures=("Olmo2ForCausalLM",),
        keys=_KEYS,
        build=_olmo2,
        ignored=names("clip_qkv"),
        fixed=_FIXED,
    ),
    Family(
        name="olmo3",
        config_class="Olmo3Config",
        architectures=("Olmo3ForCausalLM",),
        keys=keys(
            _KEYS,
            sliding_window=Key(4096, "count", nullable=True),
            layer_types=Key(None, "words", nullable=True),
        ),
        build=_olmo3,
        ignored=names("clip_qkv"),
        fixed=_FIXED,
    ),
    Family(
        name="olmoe",
        config_class="OlmoeConfig",
        architectures=("OlmoeForCausalLM",),
        keys=keys(
            without(_KEYS, "head_dim"),
            hidden_size=2048,
            intermediate_size=2048,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_experts=Key(64, aliases=("num_local_experts",)),
            num_experts_per_tok=Key(8),
        ),
        build=_olmoe,
        ignored=names("clip_qkv norm_topk_prob output_router_logits router_aux_loss_coef"),
        fixed=_FIXED,
    ),
)
