"""MiniMax-Text-01 and M1: lightning attention with a layer of softmax attention in each period, experts in every layer.

A lightning layer has q, k and v in one matrix, a gate as wide as its heads and an RMSNorm before its output. How it is
cut by TP, and what it keeps for the backward, is not accounted for. The first configs say which layers are which by
`attn_type_list`, those of the library by `layer_types`.
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
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, names, one_of
from trainledger.facts.model import Block, Moe

LIGHTNING = "layers of lightning attention"
"""What `Model.unaccounted` calls them."""


def _softmax(values: Values, layers: int) -> tuple[bool, ...]:
    """Which layers have softmax attention."""
    words, numbers = values.words("layer_types"), values.counts("attn_type_list")
    if words is not None:
        check_length(values, "layer_types", len(words), layers)
        one_of(values, "layer_types", words, ("full_attention", "linear_attention"))
        return tuple(word == "full_attention" for word in words)
    if numbers is not None:
        check_length(values, "attn_type_list", len(numbers), layers)
        if set(numbers) - {0, 1}:
            raise values.refuse("attn_type_list", "0 is lightning attention, 1 softmax attention", "correct the list")
        return tuple(number == 1 for number in numbers)
    return tuple(index % 2 == 0 for index in range(layers))


def build(values: Values) -> Parts:
    """Blocks of a MiniMax: those with softmax attention, and those with lightning attention."""
    heads = read_heads(values)
    hidden, width, experts = heads.hidden, values.dim("intermediate_size"), values.dim("num_local_experts")
    top_k = check_top_k(values, experts, "num_experts_per_tok")
    path, matrices = "block_sparse_moe", ("w1", "w3", "w2")
    mixers = {
        True: attention("self_attn", heads),
        False: (
            *norm("self_attn.norm", heads.width),
            *linear("self_attn.qkv_proj", 3 * heads.width, hidden, "attention"),
            *linear("self_attn.out_proj", hidden, heads.width, "attention"),
            *linear("self_attn.output_gate", heads.width, hidden, "attention"),
        ),
    }
    tensors = (
        *norm("input_layernorm", hidden),
        *norm("post_attention_layernorm", hidden),
        *router(f"{path}.gate", experts, hidden),
        *gated_mlp(f"{path}.experts.{{e}}", hidden, width, role="expert", copies=experts, parts=matrices),
    )

    def block(softmax: bool, at: tuple[int, ...]) -> Block:
        return Block(
            kind="moe" if softmax else "moe-lightning",
            layers=at,
            tensors=(*mixers[softmax], *tensors),
            norms=2,
            attention=heads.attention() if softmax else None,
            moe=Moe(experts=experts, top_k=top_k, intermediate=width, gated=True),
        )

    kinds = _softmax(values, values.dim("num_hidden_layers"))
    return stack(values, blocks_of(kinds, block), unaccounted=() if all(kinds) else (LIGHTNING,))


FAMILIES = (
    Family(
        name="minimax",
        config_class="MiniMaxConfig",
        architectures=("MiniMaxForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"),
        model_types=("minimax_text_01", "minimax_m1"),
        keys=keys(
            DECODER_KEYS,
            intermediate_size=14336,
            num_key_value_heads=8,
            num_local_experts=Key(8, aliases=("num_experts",)),
            num_experts_per_tok=Key(2),
            layer_types=Key(None, "words", nullable=True),
            attn_type_list=Key(None, "counts", nullable=True),
        ),
        build=build,
        ignored=names(
            "block_size full_attn_alpha_factor full_attn_beta_factor linear_attn_alpha_factor linear_attn_beta_factor "
            "mlp_alpha_factor mlp_beta_factor layernorm_full_attention_alpha layernorm_full_attention_beta "
            "layernorm_linear_attention_alpha layernorm_linear_attention_beta layernorm_mlp_alpha layernorm_mlp_beta "
            "output_router_logits postnorm rotary_dim router_aux_loss_coef router_jitter_noise shared_moe_mode"
        ),
        fixed={"shared_intermediate_size": (0, [0]), "sliding_window": (None,)},
    ),
)
