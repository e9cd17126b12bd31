"""Qwen2, Qwen2-MoE, Qwen3 and Qwen3-MoE, whose shapes the text decoders of Qwen3-VL have.

Qwen2 has biases on q, k and v whatever the config says; Qwen3 has RMSNorms over the head size of q and k instead.
The MoE classes choose dense or routed layers by `decoder_sparse_step` and `mlp_only_layers`; Qwen2-MoE adds a shared
expert with a gate of one output.
"""

from __future__ import annotations

from trainledger.facts.families.common import (
    DECODER_KEYS,
    attention,
    blocks_of,
    gated_mlp,
    label,
    linear,
    norm,
    qk_norms,
    read_heads,
    stack,
    windows,
)
from trainledger.facts.families.experts import check_top_k, router
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, names, without
from trainledger.facts.model import Block, Mlp, Moe, Tensor


def _windows(values: Values, layers: int) -> tuple[int | None, ...]:
    """Window of each layer: none slides unless `use_sliding_window`.

    Then the layers from `max_window_layers` on do; in Qwen2-MoE every other layer before it; in Qwen3-MoE all.
    """
    used = values.flag("use_sliding_window")
    if "max_window_layers" not in values.items:
        return ((values.maybe("sliding_window") or None) if used else None,) * layers
    edge = values.items["max_window_layers"]
    if values.family.name == "qwen2_moe":
        return windows(values, layers, lambda index: index % 2 == 0 and index < edge, used=used)
    return windows(values, layers, lambda index: index >= edge, used=used)


def routed_layers(values: Values, layers: int) -> list[bool]:
    """Which layers have experts; a dense family has none."""
    if "decoder_sparse_step" not in values.items or not values.items["num_experts"]:
        return [False] * layers
    step, dense = values.dim("decoder_sparse_step"), set(values.counts("mlp_only_layers") or ())
    return [index not in dense and (index + 1) % step == 0 for index in range(layers)]


def experts_of(values: Values, hidden: int, *, gate_first: bool) -> tuple[tuple[Tensor, ...], Moe]:
    """Routed experts and their router; `gate_first`: the router stands before them, and a gated shared one behind."""
    experts, width = values.dim("num_experts"), values.dim("moe_intermediate_size")
    routed = gated_mlp("mlp.experts.{e}", hidden, width, role="expert", copies=experts)
    scores = router("mlp.gate", experts, hidden)
    shared: tuple[Tensor, ...] = ()
    shared_width = 0
    if gate_first:
        shared_width = values.dim("shared_expert_intermediate_size")
        shared = (
            *gated_mlp("mlp.shared_expert", hidden, shared_width, role="shared_expert"),
            *linear("mlp.shared_expert_gate", 1, hidden, "shared_expert"),
        )
    moe = Moe(
        experts=experts,
        top_k=check_top_k(values, experts, "num_experts_per_tok"),
        intermediate=width,
        gated=True,
        shared_intermediate=shared_width,
    )
    return ((*scores, *routed) if gate_first else (*routed, *scores)) + shared, moe


def _build(values: Values, *, qkv_bias: bool, out_bias: bool, qk_norm: bool, shared: bool = False) -> Parts:
    heads = read_heads(values)
    layers = values.dim("num_hidden_layers")
    width = values.dim("intermediate_size")
    norms = qk_norms(heads) if qk_norm else ()
    kinds = list(zip(routed_layers(values, layers), _windows(values, layers), strict=True))

    def block(kind: tuple[bool, int | None], at: tuple[int, ...]) -> Block:
        routed, window = kind
        moe = None
        if routed:
            network, moe = experts_of(values, heads.hidden, gate_first=shared)
        else:
            network = gated_mlp("mlp", heads.hidden, width)
        return Block(
            kind=label("moe" if routed else "dense", window),
            layers=at,
            tensors=(
                *attention("self_attn", heads, qkv_bias=qkv_bias, out_bias=out_bias),
                *norms,
                *network,
                *norm("input_layernorm", heads.hidden),
                *norm("post_attention_layernorm", heads.hidden),
            ),
            norms=2,
            attention=heads.attention(window=window, qk_norm=qk_norm),
            mlp=None if routed else Mlp(intermediate=width, gated=True),
            moe=moe,
            keeps_end=routed and shared,
        )

    return stack(values, blocks_of(kinds, block))


def _qwen2(values: Values) -> Parts:
    return _build(values, qkv_bias=True, out_bias=False, qk_norm=False)


def _qwen2_moe(values: Values) -> Parts:
    return _build(values, qkv_bias=values.flag("qkv_bias"), out_bias=False, qk_norm=False, shared=True)


def _qwen3(values: Values) -> Parts:
    bias = values.flag("attention_bias")
    return _build(values, qkv_bias=bias, out_bias=bias, qk_norm=True)


_DENSE = keys(
    DECODER_KEYS,
    vocab_size=151936,
    intermediate_size=22016,
    num_key_value_heads=32,
    use_sliding_window=Key(False, "flag"),
    sliding_window=Key(4096, "count", nullable=True),
    max_window_layers=Key(28, "count"),
    layer_types=Key(None, "words", nullable=True),
)

_MOE = keys(
    _DENSE,
    hidden_size=2048,
    num_hidden_layers=24,
    decoder_sparse_step=Key(1),
    mlp_only_layers=Key(None, "counts", nullable=True),
)

_ROUTING = names("norm_topk_prob output_router_logits router_aux_loss_coef")


FAMILIES = (
    Family(
        name="qwen2",
        config_class="Qwen2Config",
        architectures=("Qwen2ForCausalLM",),
        keys=_DENSE,
        build=_qwen2,
        ignored=names("use_mrope qkv_bias attention_bias"),
        fixed={"mlp_bias": (False,)},
    ),
    Family(
        name="qwen2_moe",
        config_class="Qwen2MoeConfig",
        architectures=("Qwen2MoeForCausalLM",),
        keys=keys(
            _MOE,
            intermediate_size=5632,
            num_attention_heads=16,
            num_key_value_heads=16,
            moe_intermediate_size=Key(1408),
            shared_expert_intermediate_size=Key(5632),
            num_experts_per_tok=Key(4),
            num_experts=Key(60, "count"),
            qkv_bias=Key(True, "flag"),
        ),
        build=_qwen2_moe,
        ignored=_ROUTING | names("use_mrope"),
    ),
    Family(
        name="qwen3",
        config_class="Qwen3Config",
        architectures=("Qwen3ForCausalLM",),
        model_types=("qwen3_vl_text",),
        keys=keys(_DENSE, head_dim=Key(128), attention_bias=Key(False, "flag")),
        build=_qwen3,
        fixed={"mlp_bias": (False,), "use_qk_norm": (True,)},
    ),
    Family(
        name="qwen3_moe",
        config_class="Qwen3MoeConfig",
        architectures=("Qwen3MoeForCausalLM",),
        model_types=("qwen3_vl_moe_text",),
        keys=keys(
            without(_MOE, "max_window_layers", "layer_types"),
            intermediate_size=6144,
            num_key_value_heads=4,
            moe_intermediate_size=Key(768),
            num_experts_per_tok=Key(8),
            num_experts=Key(128, "count", aliases=("num_local_experts",)),
            attention_bias=Key(False, "flag"),
        ),
        build=_qwen3,
        ignored=_ROUTING | names("max_window_layers"),
        fixed={"mlp_bias": (False,), "use_qk_norm": (True,)},
    ),
)
