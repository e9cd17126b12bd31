"""OLMo, OLMo 2 and OLMo 3.

OLMo normalises without parameters. OLMo 2 and 3 normalise what attention and network give back, not what they take,
and have RMSNorms over all heads of q and of k, which TP cuts with the heads. OLMo 3 slides in three layers of four.
"""

from __future__ import annotations

from trainledger.facts.families.common import (
    DECODER_KEYS,
    Heads,
    attention,
    blocks_of,
    gated_mlp,
    label,
    norm,
    read_heads,
    stack,
    windows,
)
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, names
from trainledger.facts.model import Block, Mlp, Tensor


def _wide_norms(heads: Heads) -> tuple[Tensor, ...]:
    return (
        Tensor(name="self_attn.q_norm.weight", shape=(heads.width,), role="norm", tp_dim=0, tp_units=heads.heads),
        Tensor(name="self_attn.k_norm.weight", shape=(heads.kv_width,), role="norm", tp_dim=0, tp_units=heads.kv_heads),
    )


def _build(values: Values, kinds: tuple[int | None, ...], *, post_norm: bool) -> Parts:
    heads = read_heads(values)
    hidden, width = heads.hidden, values.dim("intermediate_size")
    bias = values.flag("attention_bias")

    def block(window: int | None, at: tuple[int, ...]) -> Block:
        return Block(
            kind=label("dense", window),
            layers=at,
            tensors=(
                *attention("self_attn", heads, qkv_bias=bias, out_bias=bias),
                *(_wide_norms(heads) if post_norm else ()),
                *gated_mlp("mlp", hidden, width),
                *(norm("post_attention_layernorm", hidden) if post_norm else ()),
                *(norm("post_feedforward_layernorm", hidden) if post_norm else ()),
            ),
            norms=2,
            attention=heads.attention(window=window, qk_norm=post_norm),
            mlp=Mlp(intermediate=width, gated=True),
            keeps_end=post_norm,
        )

    return stack(values, blocks_of(kinds, block), last=None if post_norm else ())


def _olmo(values: Values) -> Parts:
    return _build(values, (None,) * values.dim("num_hidden_layers"), post_norm=False)


def _olmo2(values: Values) -> Parts:
    return _build(values, (None,) * values.dim("num_hidden_layers"), post_norm=True)


def _olmo3(values: Values) -> Parts:
    layers = values.dim("num_hidden_layers")
    return _build(values, windows(values, layers, lambda index: (index + 1) % 4 != 0), post_norm=True)


_KEYS = keys(DECODER_KEYS, vocab_size=50304, attention_bias=Key(False, "flag"))

_FIXED: dict[str, tuple[object, ...]] = {"mlp_bias": (False,)}

FAMILIES = (
    Family(
        name="olmo",
        config_class="OlmoConfig",
        architectures=("OlmoForCausalLM",),
        keys=_KEYS,
        build=_olmo,
        ignored=names("clip_qkv"),
        fixed=_FIXED,
    ),
    Family(
        name="olmo2",
        config_class="Olmo2Config",
        architectures=("Olmo2ForCausalLM",),
        keys=_KEYS,
        build=_olmo2,
        ignored=names("clip_qkv"),
        fixed=_FIXED,
    ),
    Family(
        name="olmo3",
        config_class="Olmo3Config",
        architectures=("Olmo3ForCausalLM",),
        keys=keys(
            _KEYS,
            sliding_window=Key(4096, "count", nullable=True),
            layer_types=Key(None, "words", nullable=True),
        ),
        build=_olmo3,
        ignored=names("clip_qkv"),
        fixed=_FIXED,
    ),
)
