"""LFM2: most layers mix tokens with a gated short convolution, the others with attention; LFM2-MoE adds experts.

q and k have RMSNorms over the head size. A dense LFM2 takes two thirds of `intermediate_size`, rounded up, unless
`block_auto_adjust_ff_dim` is off. What the convolutions keep for the backward is not accounted for.
"""

from __future__ import annotations

from trainledger.facts.families.common import (
    DECODER_KEYS,
    attention,
    blocks_of,
    check_length,
    gated_mlp,
    linear,
    norm,
    read_heads,
    stack,
)
from trainledger.facts.families.experts import check_top_k, router
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, names, one_of, without
from trainledger.facts.model import Block, Mlp, Moe, Tensor

CONVOLUTION = "short convolutions"
"""What `Model.unaccounted` calls them."""
_MATRICES = ("w1", "w3", "w2")


def _attends(values: Values, layers: int) -> tuple[bool, ...]:
    """Which layers have attention: as listed by word, or by index, or all."""
    words, indices = values.words("layer_types"), values.counts("full_attn_idxs")
    if words is None:
        return tuple(indices is None or index in indices for index in range(layers))
    check_length(values, "layer_types", len(words), layers)
    one_of(values, "layer_types", words, ("conv", "short_conv", "full_attention"))
    return tuple(word == "full_attention" for word in words)


def _convolution(values: Values, hidden: int) -> tuple[Tensor, ...]:
    bias = values.flag("conv_bias")
    added = (Tensor(name="conv.conv.bias", shape=(hidden,), role="ssm"),) if bias else ()
    return (
        Tensor(name="conv.conv.weight", shape=(hidden, 1, values.dim("conv_L_cache")), role="ssm"),
        *added,
        *linear("conv.in_proj", 3 * hidden, hidden, "ssm", bias=bias),
        *linear("conv.out_proj", hidden, hidden, "ssm", bias=bias),
    )


def _dense_width(values: Values) -> int:
    width = values.dim("intermediate_size")
    if not values.flag("block_auto_adjust_ff_dim"):
        return width
    width = int(2 * width / 3)
    factor, step = values.items["block_ffn_dim_multiplier"], values.dim("block_multiple_of")
    return width if factor is None else -(-int(factor * width) // step) * step


def _experts(values: Values, hidden: int) -> tuple[tuple[Tensor, ...], Moe]:
    experts, width = values.dim("num_experts"), values.dim("moe_intermediate_size")
    base = "feed_forward.experts.{e}"
    tensors = (
        *gated_mlp(base, hidden, width, role="expert", copies=experts, parts=_MATRICES),
        *router("feed_forward.gate", experts, hidden),
    )
    top_k = check_top_k(values, experts, "num_experts_per_tok")
    return tensors, Moe(experts=experts, top_k=top_k, intermediate=width, gated=True)


def build(values: Values) -> Parts:
    """Blocks of an LFM2; the first `num_dense_layers` of a mixture of experts have none."""
    heads = read_heads(values)
    hidden, layers, width = heads.hidden, values.dim("num_hidden_layers"), _dense_width(values)
    first = values.items.get("num_dense_layers", layers)
    mixers = {
        False: _convolution(values, hidden),
        True: (
            *attention("self_attn", heads, out="out_proj"),
            *norm("self_attn.q_layernorm", heads.head_dim),
            *norm("self_attn.k_layernorm", heads.head_dim),
        ),
    }
    kinds = [(attends, index >= first) for index, attends in enumerate(_attends(values, layers))]

    def block(kind: tuple[bool, bool], at: tuple[int, ...]) -> Block:
        (attends, routed), moe = kind, None
        if routed:
            network, moe = _experts(values, hidden)
        else:
            network = gated_mlp("feed_forward", hidden, width, parts=_MATRICES)
        return Block(
            kind=f"{'moe' if routed else 'dense'}{'' if attends else '-convolution'}",
            layers=at,
            tensors=(*mixers[attends], *network, *norm("operator_norm", hidden), *norm("ffn_norm", hidden)),
            norms=2,
            attention=heads.attention(qk_norm=True) if attends else None,
            mlp=None if routed else Mlp(intermediate=width, gated=True),
            moe=moe,
        )

    mixed = any(not attends for attends, _ in kinds)
    return stack(
        values,
        blocks_of(kinds, block),
        last=norm("model.embedding_norm", hidden),
        unaccounted=(CONVOLUTION,) if mixed else (),
    )


_KEYS = keys(
    without(DECODER_KEYS, "head_dim"),
    vocab_size=65536,
    num_key_value_heads=8,
    tie_word_embeddings=Key(True, "flag", aliases=("tie_embedding",)),
    conv_bias=Key(False, "flag"),
    conv_L_cache=Key(3),
    layer_types=Key(None, "words", nullable=True),
)

_IGNORED = names(
    "block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu "
    "block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init num_heads theta use_pos_enc"
)

FAMILIES = (
    Family(
        name="lfm2",
        config_class="Lfm2Config",
        architectures=("Lfm2ForCausalLM",),
        keys=keys(
            _KEYS,
            hidden_size=2560,
            intermediate_size=Key(12288, aliases=("block_ff_dim",)),
            block_auto_adjust_ff_dim=Key(True, "flag"),
            block_ffn_dim_multiplier=Key(1.0, "factor", nullable=True),
            block_multiple_of=Key(256),
            full_attn_idxs=Key(None, "counts", nullable=True),
        ),
        build=build,
        ignored=_IGNORED,
    ),
    Family(
        name="lfm2_moe",
        config_class="Lfm2MoeConfig",
        architectures=("Lfm2MoeForCausalLM",),
        keys=keys(
            _KEYS,
            hidden_size=2048,
            intermediate_size=7168,
            moe_intermediate_size=Key(1792),
            num_dense_layers=Key(2, "count"),
            num_experts=Key(32, aliases=("num_local_experts",)),
            num_experts_per_tok=Key(4),
        ),
        build=build,
        ignored=_IGNORED | names("norm_topk_prob output_router_logits routed_scaling_factor use_expert_bias"),
    ),
)
