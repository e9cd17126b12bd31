"""Llama 4, the text decoder: routed experts in some layers, attention in chunks in most.

The state dict stacks the experts of a layer, with gate and up side by side. Query and key are normalised by their L2
length in the layers with rotary embeddings: no parameter.
"""

from __future__ import annotations

from trainledger.facts.families.common import (
    DECODER_KEYS,
    attention,
    blocks_of,
    check_length,
    gated_mlp,
    label,
    norm,
    read_heads,
    stack,
)
from trainledger.facts.families.experts import check_top_k, router, stacked_experts
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, names, one_of
from trainledger.facts.model import Block, Mlp, Moe


def _moe_layers(values: Values, layers: int) -> frozenset[int]:
    given = values.counts("moe_layers")
    if given is None:
        step = values.dim("interleave_moe_layer_step")
        return frozenset(range(step - 1, layers, step))
    return frozenset(given)


def _attention_kinds(values: Values, layers: int) -> list[tuple[int | None, bool]]:
    """Window and query-key norm of each layer. A query sees its own chunk at most, half of it on average."""
    rotary = values.counts("no_rope_layers")
    if rotary:
        check_length(values, "no_rope_layers", len(rotary), layers)
    else:
        every = values.dim("no_rope_layer_interval")
        rotary = tuple(int((index + 1) % every != 0) for index in range(layers))
    chunk = values.maybe("attention_chunk_size") or None
    words = values.words("layer_types")
    if words is None:
        words = tuple("chunked_attention" if use else "full_attention" for use in rotary)
    check_length(values, "layer_types", len(words), layers)
    one_of(values, "layer_types", words, ("chunked_attention", "full_attention"))
    norms = values.flag("use_qk_norm")
    return [
        (chunk if word == "chunked_attention" else None, norms and bool(use))
        for word, use in zip(words, rotary, strict=True)
    ]


def build(values: Values) -> Parts:
    """Blocks of a Llama 4 text decoder: dense or experts, chunked or full attention."""
    heads = read_heads(values)
    layers = values.dim("num_hidden_layers")
    width, dense_width = values.dim("intermediate_size"), values.dim("intermediate_size_mlp")
    experts = values.dim("num_local_experts")
    bias = values.flag("attention_bias")
    moe_layers = _moe_layers(values, layers)
    top_k = check_top_k(values, experts, "num_experts_per_tok")
    kinds = [
        (index in moe_layers, window, qk_norm)
        for index, (window, qk_norm) in enumerate(_attention_kinds(values, layers))
    ]

    def block(kind: tuple[bool, int | None, bool], at: tuple[int, ...]) -> Block:
        routed, window, qk_norm = kind
        if routed:
            network = (
                *stacked_experts("feed_forward.experts", heads.hidden, width, experts),
                *router("feed_forward.router", experts, heads.hidden),
                *gated_mlp("feed_forward.shared_expert", heads.hidden, width, role="shared_expert"),
            )
        else:
            network = gated_mlp("feed_forward", heads.hidden, dense_width)
        name = label("moe" if routed else "dense", window)
        return Block(
            kind=name if qk_norm or not values.flag("use_qk_norm") else f"{name}-nope",
            layers=at,
            tensors=(
                *attention("self_attn", heads, qkv_bias=bias, out_bias=bias),
                *network,
                *norm("input_layernorm", heads.hidden),
                *norm("post_attention_layernorm", heads.hidden),
            ),
            norms=2,
            attention=heads.attention(window=window, qk_norm=qk_norm),
            mlp=None if routed else Mlp(intermediate=dense_width, gated=True),
            moe=Moe(experts=experts, top_k=top_k, intermediate=width, gated=True, shared_intermediate=width)
            if routed
            else None,
        )

    note = "attention in chunks: a query sees its own chunk, so half of the window on average"
    blocks = blocks_of(kinds, block)
    return stack(values, blocks, notes=(note,) if any(kind[1] for kind in kinds) else ())


FAMILIES = (
    Family(
        name="llama4_text",
        config_class="Llama4TextConfig",
        architectures=("Llama4ForCausalLM", "Llama4TextForCausalLM"),
        keys=keys(
            DECODER_KEYS,
            vocab_size=202048,
            hidden_size=5120,
            intermediate_size=8192,
            intermediate_size_mlp=Key(16384),
            num_hidden_layers=48,
            num_attention_heads=40,
            num_key_value_heads=8,
            head_dim=128,
            num_experts_per_tok=Key(1),
            num_local_experts=Key(16),
            moe_layers=Key(None, "counts", nullable=True),
            interleave_moe_layer_step=Key(1),
            use_qk_norm=Key(True, "flag"),
            no_rope_layers=Key(None, "counts", nullable=True),
            no_rope_layer_interval=Key(4),
            attention_chunk_size=Key(8192, "count", nullable=True),
            layer_types=Key(None, "words", nullable=True),
            attention_bias=Key(False, "flag"),
        ),
        build=build,
        ignored=names(
            "output_router_logits router_aux_loss_coef router_jitter_noise attn_temperature_tuning floor_scale "
            "attn_scale for_llm_compressor"
        ),
        fixed={"mlp_bias": (False,)},
    ),
)
