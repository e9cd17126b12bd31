"""GLM-4.5: grouped attention with biases on q, k and v only, DeepSeek's layout of experts, an optional norm of q and k.

The router bias `e_score_correction_bias` is a buffer and is not counted. The checkpoint holds multi-token-prediction
layers after the last one: `Model.mtp`.
"""

from __future__ import annotations

from trainledger.facts.families.common import (
    DECODER_KEYS,
    attention,
    blocks_of,
    gated_mlp,
    norm,
    qk_norms,
    read_heads,
    stack,
)
from trainledger.facts.families.experts import experts_beside_shared, mtp_block
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, names
from trainledger.facts.model import Block, Mlp


def build(values: Values) -> Parts:
    """Blocks of a GLM-4.5: the first `first_k_dense_replace` layers dense, the rest routed."""
    heads = read_heads(values)
    hidden, layers = heads.hidden, values.dim("num_hidden_layers")
    width, dense = values.dim("intermediate_size"), values.maybe("first_k_dense_replace") or 0
    bias, qk_norm = values.flag("attention_bias"), values.flag("use_qk_norm")

    def block(routed: bool, at: tuple[int, ...]) -> Block:
        moe = None
        if routed:
            network, moe = experts_beside_shared(values, hidden)
        else:
            network = gated_mlp("mlp", hidden, width)
        return Block(
            kind="moe" if routed else "dense",
            layers=at,
            tensors=(
                *attention("self_attn", heads, qkv_bias=bias),
                *(qk_norms(heads) if qk_norm else ()),
                *network,
                *norm("input_layernorm", hidden),
                *norm("post_attention_layernorm", hidden),
            ),
            norms=2,
            attention=heads.attention(qk_norm=qk_norm),
            mlp=None if routed else Mlp(intermediate=width, gated=True),
            moe=moe,
        )

    depths = values.maybe("num_nextn_predict_layers") or 0
    blocks = blocks_of([index >= dense for index in range(layers)], block)
    mtp = mtp_block(blocks[-1], hidden, layers) if depths else None
    return stack(values, blocks, mtp=mtp, mtp_depths=depths)


FAMILIES = (
    Family(
        name="glm4_moe",
        config_class="Glm4MoeConfig",
        architectures=("Glm4MoeForCausalLM",),
        keys=keys(
            DECODER_KEYS,
            vocab_size=151552,
            intermediate_size=10944,
            num_hidden_layers=46,
            num_attention_heads=96,
            num_key_value_heads=8,
            attention_bias=Key(False, "flag"),
            use_qk_norm=Key(False, "flag"),
            moe_intermediate_size=Key(1408),
            num_experts_per_tok=Key(8),
            n_shared_experts=Key(1, "count", nullable=True),
            n_routed_experts=Key(128, aliases=("num_local_experts",)),
            first_k_dense_replace=Key(1, "count", nullable=True),
            num_nextn_predict_layers=Key(1, "count", nullable=True, aliases=("num_mtp_layers",)),
        ),
        build=build,
        ignored=names(
            "n_group topk_group topk_method norm_topk_prob routed_scaling_factor scoring_func output_router_logits "
            "router_aux_loss_coef"
        ),
        fixed={"mlp_bias": (False,), "moe_layer_freq": (1,)},
    ),
)
