"""gpt-oss: routed experts with biases in every layer, a learned sink per head, sliding attention in every other layer.

The state dict stacks the experts of a layer, with gate and up interleaved.
"""

from __future__ import annotations

from trainledger.facts.families.common import (
    DECODER_KEYS,
    attention,
    blocks_of,
    label,
    norm,
    read_heads,
    stack,
    windows,
)
from trainledger.facts.families.experts import check_top_k, router, stacked_experts
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, names
from trainledger.facts.model import Block, Moe, Tensor


def build(values: Values) -> Parts:
    """Blocks of a gpt-oss."""
    heads = read_heads(values)
    hidden, width, experts = heads.hidden, values.dim("intermediate_size"), values.dim("num_local_experts")
    bias = values.flag("attention_bias")
    sinks = Tensor(name="self_attn.sinks", shape=(heads.heads,), role="attention", tp_dim=0, tp_units=heads.heads)
    moe = Moe(
        experts=experts,
        top_k=check_top_k(values, experts, "num_experts_per_tok"),
        intermediate=width,
        gated=True,
    )

    def block(window: int | None, at: tuple[int, ...]) -> Block:
        return Block(
            kind=label("moe", window),
            layers=at,
            tensors=(
                sinks,
                *attention("self_attn", heads, qkv_bias=bias, out_bias=bias),
                *router("mlp.router", experts, hidden, bias=True),
                *stacked_experts("mlp.experts", hidden, width, experts, bias=True),
                *norm("input_layernorm", hidden),
                *norm("post_attention_layernorm", hidden),
            ),
            norms=2,
            attention=heads.attention(window=window, scores=("sinks",)),
            moe=moe,
        )

    kinds = windows(values, values.dim("num_hidden_layers"), lambda index: index % 2 == 0)
    return stack(values, blocks_of(kinds, block))


FAMILIES = (
    Family(
        name="gpt_oss",
        config_class="GptOssConfig",
        architectures=("GptOssForCausalLM",),
        keys=keys(
            DECODER_KEYS,
            num_hidden_layers=36,
            num_local_experts=Key(128, aliases=("num_experts",)),
            vocab_size=201088,
            hidden_size=2880,
            intermediate_size=2880,
            head_dim=64,
            num_attention_heads=64,
            num_key_value_heads=8,
            sliding_window=Key(128, "count", nullable=True),
            num_experts_per_tok=Key(4, aliases=("experts_per_token",)),
            layer_types=Key(None, "words", nullable=True),
            attention_bias=Key(True, "flag"),
        ),
        build=build,
        ignored=names("swiglu_limit swiglu_alpha router_aux_loss_coef output_router_logits initial_context_length"),
        fixed={"mlp_bias": (False,)},
    ),
)
