"""ERNIE 4.5 with experts: dense layers before and after a stretch of routed ones, shared experts beside the routed.

The router's correction bias is not trained and not counted. Multi-token-prediction layers that a config may name are
not read by the library's class, and neither here.
"""

from __future__ import annotations

from trainledger.facts.families.common import (
    DECODER_KEYS,
    attention,
    blocks_of,
    gated_mlp,
    norm,
    read_heads,
    stack,
)
from trainledger.facts.families.experts import check_top_k, router
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, names
from trainledger.facts.model import Block, Mlp, Moe, Tensor


def _experts(values: Values, hidden: int, *, bias: bool) -> tuple[tuple[Tensor, ...], Moe]:
    experts, width = values.dim("moe_num_experts"), values.dim("moe_intermediate_size")
    shared = width * values.items["moe_num_shared_experts"]
    tensors = (
        *router("mlp.gate", experts, hidden),
        *gated_mlp("mlp.experts.{e}", hidden, width, role="expert", copies=experts),
        *(gated_mlp("mlp.shared_experts", hidden, shared, bias=bias, role="shared_expert") if shared else ()),
    )
    top_k = check_top_k(values, experts, "moe_k")
    return tensors, Moe(experts=experts, top_k=top_k, intermediate=width, gated=True, shared_intermediate=shared)


def _routed(values: Values, layers: int) -> list[bool]:
    """Every `moe_layer_interval`-th layer from the start to the end, both among them."""
    start, end = values.items["moe_layer_start_index"], values.items["moe_layer_end_index"]
    last, every = layers - 1 if end is None or end == -1 else end, values.dim("moe_layer_interval")
    return [(index + 1) % every == 0 and start <= index <= last for index in range(layers)]


def build(values: Values) -> Parts:
    """Blocks of an ERNIE 4.5 with experts."""
    heads = read_heads(values)
    hidden, width, bias = heads.hidden, values.dim("intermediate_size"), values.flag("use_bias")

    def block(routed: bool, at: tuple[int, ...]) -> Block:
        moe = None
        if routed:
            network, moe = _experts(values, hidden, bias=bias)
        else:
            network = gated_mlp("mlp", hidden, width, bias=bias)
        return Block(
            kind="moe" if routed else "dense",
            layers=at,
            tensors=(
                *attention("self_attn", heads, qkv_bias=bias, out_bias=bias),
                *network,
                *norm("input_layernorm", hidden),
                *norm("post_attention_layernorm", hidden),
            ),
            norms=2,
            attention=heads.attention(),
            mlp=None if routed else Mlp(intermediate=width, gated=True),
            moe=moe,
        )

    return stack(values, blocks_of(_routed(values, values.dim("num_hidden_layers")), block), head_bias=bias)


FAMILIES = (
    Family(
        name="ernie4_5_moe",
        config_class="Ernie4_5_MoeConfig",
        architectures=("Ernie4_5_MoeForCausalLM",),
        keys=keys(
            DECODER_KEYS,
            vocab_size=103424,
            hidden_size=2560,
            intermediate_size=12288,
            num_hidden_layers=28,
            num_attention_heads=20,
            num_key_value_heads=4,
            tie_word_embeddings=True,
            use_bias=Key(False, "flag"),
            moe_intermediate_size=Key(1536),
            moe_k=Key(6, aliases=("num_experts_per_tok",)),
            moe_num_experts=Key(64, aliases=("num_experts", "num_local_experts")),
            moe_num_shared_experts=Key(2, "count"),
            moe_layer_start_index=Key(1, "count"),
            moe_layer_end_index=Key(-1, "last", nullable=True),
            moe_layer_interval=Key(1),
        ),
        build=build,
        ignored=names(
            "moe_capacity moe_gate moe_gate_act moe_norm_min moe_use_aux_free num_nextn_predict_layers "
            "output_router_logits router_aux_loss_coef compression_ratio fuse_rms_norm fuse_swiglu"
        ),
    ),
)
