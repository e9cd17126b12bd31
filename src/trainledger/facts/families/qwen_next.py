"""Qwen3-Next and the text decoders of Qwen3.5: three of four layers are gated delta networks, the rest attention.

The attention has a gate as wide as its heads in the query's matrix, and RMSNorms over the head size of q and k. A delta
network projects q, k, v, its output's gate and two numbers a head, in two matrices or four, behind a short convolution
over q, k and v. How it is cut by TP, and what it keeps for the backward, is not accounted for. Multi-token-prediction
layers of the checkpoints are not read by the library's classes, and neither here.
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
    qk_norms,
    read_heads,
    stack,
)
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, names, one_of, without
from trainledger.facts.families.qwen import experts_of, routed_layers
from trainledger.facts.model import Block, Mlp, Tensor

DELTA = "gated delta networks"
"""What `Model.unaccounted` calls them."""


def _mixers(values: Values, layers: int) -> tuple[str, ...]:
    given, every = values.words("layer_types"), values.dim("full_attention_interval")
    if given is None:
        return tuple("linear_attention" if (index + 1) % every else "full_attention" for index in range(layers))
    check_length(values, "layer_types", len(given), layers)
    one_of(values, "layer_types", given, ("linear_attention", "full_attention"))
    return given


def _delta(values: Values, hidden: int, *, joined: bool) -> tuple[Tensor, ...]:
    """`joined`: the projections are two matrices, as in Qwen3-Next; else four, in Qwen3.5's order."""
    heads, width = values.dim("linear_num_value_heads"), values.dim("linear_value_head_dim")
    key = values.dim("linear_num_key_heads") * values.dim("linear_key_head_dim")
    value, base = heads * width, "linear_attn"
    first = (
        *(Tensor(name=f"{base}.{name}", shape=(heads,), role="ssm") for name in ("dt_bias", "A_log")),
        Tensor(
            name=f"{base}.conv1d.weight", shape=(2 * key + value, 1, values.dim("linear_conv_kernel_dim")), role="ssm"
        ),
    )
    last = (*norm(f"{base}.norm", width), *linear(f"{base}.out_proj", hidden, value, "ssm"))
    if joined:
        return (
            *first,
            *linear(f"{base}.in_proj_qkvz", 2 * key + 2 * value, hidden, "ssm"),
            *linear(f"{base}.in_proj_ba", 2 * heads, hidden, "ssm"),
            *last,
        )
    return (
        *first,
        *last,
        *linear(f"{base}.in_proj_qkv", 2 * key + value, hidden, "ssm"),
        *linear(f"{base}.in_proj_z", value, hidden, "ssm"),
        *linear(f"{base}.in_proj_b", heads, hidden, "ssm"),
        *linear(f"{base}.in_proj_a", heads, hidden, "ssm"),
    )


def _attention(values: Values, hidden: int) -> tuple[Tensor, ...]:
    """As wide a gate as the heads stands in the query's matrix."""
    heads, bias = read_heads(values), values.flag("attention_bias")
    plain = attention("self_attn", heads, qkv_bias=bias, out_bias=bias)
    query = linear("self_attn.q_proj", 2 * heads.width, hidden, "attention", bias=bias, tp_dim=0, tp_units=heads.heads)
    return (*query, *(tensor for tensor in plain if ".q_proj." not in tensor.name), *qk_norms(heads))


def _build(values: Values, *, joined: bool) -> Parts:
    heads = read_heads(values)
    hidden, layers = heads.hidden, values.dim("num_hidden_layers")
    mixers = {
        "linear_attention": _delta(values, hidden, joined=joined),
        "full_attention": _attention(values, hidden),
    }
    routed = [True] * layers if values.family.name == "qwen3_5_moe_text" else routed_layers(values, layers)
    kinds = list(zip(_mixers(values, layers), routed, strict=True))

    def block(kind: tuple[str, bool], at: tuple[int, ...]) -> Block:
        (mixer, moe_layer), mlp, moe = kind, None, None
        if moe_layer:
            network, moe = experts_of(values, hidden, gate_first=True)
        else:
            mlp = Mlp(intermediate=values.dim("intermediate_size"), gated=True)
            network = gated_mlp("mlp", hidden, mlp.intermediate)
        return Block(
            kind=f"{'moe' if moe_layer else 'dense'}-{'attention' if mixer == 'full_attention' else 'delta'}",
            layers=at,
            tensors=(
                *mixers[mixer],
                *network,
                *norm("input_layernorm", hidden),
                *norm("post_attention_layernorm", hidden),
            ),
            norms=2,
            attention=heads.attention(qk_norm=True) if mixer == "full_attention" else None,
            mlp=mlp,
            moe=moe,
            keeps_end=moe_layer,
        )

    return stack(values, blocks_of(kinds, block), unaccounted=(DELTA,))


def _next(values: Values) -> Parts:
    return _build(values, joined=True)


def _three_five(values: Values) -> Parts:
    return _build(values, joined=False)


_KEYS = keys(
    DECODER_KEYS,
    num_attention_heads=16,
    head_dim=256,
    attention_bias=Key(False, "flag"),
    layer_types=Key(None, "words", nullable=True),
    full_attention_interval=Key(4),
    linear_conv_kernel_dim=Key(4),
    linear_key_head_dim=Key(128),
    linear_value_head_dim=Key(128),
    linear_num_key_heads=Key(16),
    linear_num_value_heads=Key(32),
)

_ROUTED = {
    "moe_intermediate_size": Key(512),
    "shared_expert_intermediate_size": Key(512),
    "num_experts_per_tok": Key(10),
    "num_experts": Key(512, aliases=("num_local_experts",)),
}

_IGNORED = names(
    "attn_output_gate mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings norm_topk_prob "
    "output_router_logits router_aux_loss_coef"
)

FAMILIES = (
    Family(
        name="qwen3_next",
        config_class="Qwen3NextConfig",
        architectures=("Qwen3NextForCausalLM",),
        keys=keys(
            _KEYS,
            **_ROUTED,
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=48,
            num_key_value_heads=2,
            decoder_sparse_step=Key(1),
            mlp_only_layers=Key(None, "counts", nullable=True),
        ),
        build=_next,
        ignored=_IGNORED,
    ),
    Family(
        name="qwen3_5_text",
        config_class="Qwen3_5TextConfig",
        architectures=("Qwen3_5ForCausalLM",),
        keys=keys(_KEYS, vocab_size=248320, intermediate_size=12288, num_key_value_heads=4),
        build=_three_five,
        ignored=_IGNORED,
    ),
    Family(
        name="qwen3_5_moe_text",
        config_class="Qwen3_5MoeTextConfig",
        architectures=("Qwen3_5MoeForCausalLM",),
        keys=keys(
            without(_KEYS, "intermediate_size"),
            **{**_ROUTED, "num_experts_per_tok": Key(8), "num_experts": Key(256, aliases=("num_local_experts",))},
            vocab_size=248320,
            hidden_size=2048,
            num_hidden_layers=40,
            num_key_value_heads=2,
        ),
        build=_three_five,
        ignored=_IGNORED | names("intermediate_size decoder_sparse_step"),
        fixed={"mlp_only_layers": ([],)},
    ),
)
