"""Mixtral: a Llama block whose network is routed experts, named w1 (gate), w3 (up) and w2 (down) on the Hub."""

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
)
from trainledger.facts.families.experts import check_top_k, router
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, names
from trainledger.facts.model import Block, Moe


def build(values: Values) -> Parts:
    """Blocks of a Mixtral: every layer is routed."""
    heads = read_heads(values)
    width, experts = values.dim("intermediate_size"), values.dim("num_local_experts")
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
                *attention("self_attn", heads),
                *router("block_sparse_moe.gate", experts, heads.hidden),
                *gated_mlp(
                    "block_sparse_moe.experts.{e}",
                    heads.hidden,
                    width,
                    role="expert",
                    copies=experts,
                    parts=("w1", "w3", "w2"),
                ),
                *norm("input_layernorm", heads.hidden),
                *norm("post_attention_layernorm", heads.hidden),
            ),
            norms=2,
            attention=heads.attention(window=window),
            moe=moe,
        )

    window = values.maybe("sliding_window") or None
    return stack(values, blocks_of([window] * values.dim("num_hidden_layers"), block))


FAMILIES = (
    Family(
        name="mixtral",
        config_class="MixtralConfig",
        architectures=("MixtralForCausalLM",),
        keys=keys(
            DECODER_KEYS,
            intermediate_size=14336,
            num_key_value_heads=8,
            sliding_window=Key(None, "count", nullable=True),
            num_experts_per_tok=Key(2),
            num_local_experts=Key(8, aliases=("num_experts",)),
        ),
        build=build,
        ignored=names("output_router_logits router_aux_loss_coef router_jitter_noise norm_topk_prob"),
        fixed={"attention_bias": (False,), "mlp_bias": (False,)},
    ),
)
