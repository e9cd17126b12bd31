"""MiniMax-M2: Mixtral's experts, and RMSNorms over all heads of q and of k.

The router bias `e_score_correction_bias` is a buffer and is not counted. Multi-token-prediction layers that a config
may name are not among the published weights, so they are not read.
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
    wide_norms,
)
from trainledger.facts.families.experts import check_top_k, router
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, names
from trainledger.facts.model import Block, Moe


def build(values: Values) -> Parts:
    """Blocks of a MiniMax-M2: every layer is routed."""
    heads = read_heads(values)
    hidden, width, experts = heads.hidden, values.dim("intermediate_size"), values.dim("num_local_experts")
    top_k = check_top_k(values, experts, "num_experts_per_tok")

    def block(_kind: str, at: tuple[int, ...]) -> Block:
        path = "block_sparse_moe"
        matrices = ("w1", "w3", "w2")
        return Block(
            kind="moe",
            layers=at,
            tensors=(
                *attention("self_attn", heads),
                *wide_norms(heads),
                *router(f"{path}.gate", experts, hidden),
                *gated_mlp(f"{path}.experts.{{e}}", hidden, width, role="expert", copies=experts, parts=matrices),
                *norm("input_layernorm", hidden),
                *norm("post_attention_layernorm", hidden),
            ),
            norms=2,
            attention=heads.attention(qk_norm=True),
            moe=Moe(experts=experts, top_k=top_k, intermediate=width, gated=True),
        )

    return stack(values, blocks_of(["moe"] * values.dim("num_hidden_layers"), block))


FAMILIES = (
    Family(
        name="minimax_m2",
        config_class="MiniMaxM2Config",
        architectures=("MiniMaxM2ForCausalLM",),
        keys=keys(
            DECODER_KEYS,
            vocab_size=200064,
            hidden_size=3072,
            intermediate_size=1536,
            num_hidden_layers=62,
            num_attention_heads=48,
            num_key_value_heads=8,
            head_dim=128,
            num_experts_per_tok=Key(8),
            num_local_experts=Key(256, aliases=("num_experts",)),
        ),
        build=build,
        ignored=names(
            "attn_type_list mtp_transformer_layers num_mtp_modules output_router_logits router_aux_loss_coef "
            "router_jitter_noise rotary_dim scoring_func use_mtp use_routing_bias"
        ),
        fixed={"qk_norm_type": ("per_layer",), "shared_intermediate_size": (0,), "use_qk_norm": (True,)},
    ),
)
