"""Hunyuan-A13B: RMSNorms over the head size of q and k, routed experts in every layer beside one shared network.

The published config lists sizes by layer; the layers of the library's class are all alike, so the entries must be too.
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
from trainledger.facts.families.experts import router
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, names
from trainledger.facts.model import Block, Moe


def _alike(values: Values, key: str, wanted: int | None = None) -> int | None:
    """The number that a key gives for every layer; `wanted`: the only one that is modelled."""
    found = values.each(key, values.dim("num_hidden_layers"))
    if found is None:
        return None
    if len(set(found)) > 1:
        raise values.refuse(key, "the layers of this family are modelled alike", f"--set {key}=N for all")
    if wanted is not None and found[0] != wanted:
        raise values.refuse(key, f"only {wanted} is modelled", f"--set {key}={wanted} if that is what is meant")
    return found[0]


def build(values: Values) -> Parts:
    """Blocks of a Hunyuan with experts: all are of one kind."""
    heads = read_heads(values)
    hidden, width, experts = heads.hidden, values.dim("intermediate_size"), values.dim("num_experts")
    bias = values.flag("attention_bias")
    _alike(values, "moe_intermediate_size", width)
    _alike(values, "num_shared_expert", 1)
    top_k = _alike(values, "moe_topk") or 1
    if top_k > experts:
        raise values.refuse("moe_topk", f"a token cannot visit more than the {experts} experts", "--set moe_topk=N")
    tensors = (
        *attention("self_attn", heads, qkv_bias=bias, out_bias=bias),
        *norm("self_attn.query_layernorm", heads.head_dim),
        *norm("self_attn.key_layernorm", heads.head_dim),
        *router("mlp.gate.wg", experts, hidden),
        *gated_mlp("mlp.experts.{e}", hidden, width, role="expert", copies=experts),
        *gated_mlp("mlp.shared_mlp", hidden, width, role="shared_expert"),
        *norm("input_layernorm", hidden),
        *norm("post_attention_layernorm", hidden),
    )

    def block(_kind: str, at: tuple[int, ...]) -> Block:
        return Block(
            kind="moe",
            layers=at,
            tensors=tensors,
            norms=2,
            attention=heads.attention(qk_norm=True),
            moe=Moe(experts=experts, top_k=top_k, intermediate=width, gated=True, shared_intermediate=width),
        )

    return stack(values, blocks_of(["moe"] * values.dim("num_hidden_layers"), block))


FAMILIES = (
    Family(
        name="hunyuan_v1_moe",
        config_class="HunYuanMoEV1Config",
        architectures=("HunYuanMoEV1ForCausalLM",),
        model_types=("hunyuan",),
        keys=keys(
            DECODER_KEYS,
            vocab_size=290943,
            attention_bias=Key(False, "flag"),
            num_experts=Key(1, aliases=("num_local_experts",)),
            moe_topk=Key(1, "dim or dims", aliases=("num_experts_per_tok",)),
            moe_intermediate_size=Key(None, "dim or dims", nullable=True),
            num_shared_expert=Key(None, "dim or dims", nullable=True),
        ),
        build=build,
        ignored=names(
            "add_classification_head attention_head_dim capacity_factor cla_share_factor class_num dense_list "
            "eod_token_id group_limited_greedy im_end_id im_newline_id im_start_id mask_init_id moe_drop_tokens "
            "moe_random_routing_dropped_token n_group norm_topk_prob norm_type num_media_embeds org_vocab_size "
            "output_router_logits pad_id pool_type position_embedding_xdrope routed_scaling_factor "
            "router_aux_loss_coef text_end_id text_start_id topk_group unused_tokens use_rotary_pos_emb"
        ),
        fixed={
            "mlp_bias": (False,),
            "moe_layer_num_skipped": (0,),
            "use_cla": (False,),
            "use_mixed_mlp_moe": (True,),
            "use_mla": (False,),
            "use_qk_norm": (True,),
        },
    ),
)
