"""Gemma, Gemma 2 and Gemma 3 (text).

The head size is a key of its own, not hidden size over heads. Gemma 2 and 3 normalise after attention and network as
well (four norms a block) and alternate sliding and full attention; Gemma 3 adds RMSNorms over the head size of q and k.
Gemma 2 squashes attention scores; a config that turns this off is read as if it did not.
"""

from __future__ import annotations

from collections.abc import Callable

from trainledger.facts.families.common import (
    DECODER_KEYS,
    attention,
    blocks_of,
    gated_mlp,
    label,
    norm,
    qk_norms,
    read_heads,
    stack,
    windows,
)
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, names
from trainledger.facts.model import Block, Mlp, Score

_TWO = ("input_layernorm", "post_attention_layernorm")
_FOUR = (*_TWO, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def _build(
    values: Values,
    sliding: Callable[[int], bool] | None,
    norm_names: tuple[str, ...],
    *,
    qk_norm: bool = False,
    scores: tuple[Score, ...] = (),
) -> Parts:
    heads = read_heads(values)
    layers = values.dim("num_hidden_layers")
    width, bias = values.dim("intermediate_size"), values.flag("attention_bias")
    kinds = (None,) * layers if sliding is None else windows(values, layers, sliding)
    norms = qk_norms(heads) if qk_norm else ()

    def block(window: int | None, at: tuple[int, ...]) -> Block:
        return Block(
            kind=label("dense", window),
            layers=at,
            tensors=(
                *attention("self_attn", heads, qkv_bias=bias, out_bias=bias),
                *norms,
                *gated_mlp("mlp", heads.hidden, width),
                *(tensor for name in norm_names for tensor in norm(name, heads.hidden)),
            ),
            norms=len(norm_names),
            attention=heads.attention(window=window, qk_norm=qk_norm, scores=scores),
            mlp=Mlp(intermediate=width, gated=True),
            keeps_end=norm_names == _FOUR,
        )

    return stack(values, blocks_of(kinds, block))


def _gemma(values: Values) -> Parts:
    return _build(values, None, _TWO)


def _gemma2(values: Values) -> Parts:
    return _build(values, lambda index: index % 2 == 0, _FOUR, scores=("soft-cap",))


def _gemma3(values: Values) -> Parts:
    every = values.dim("sliding_window_pattern")
    return _build(values, lambda index: (index + 1) % every != 0, _FOUR, qk_norm=True)


_KEYS = keys(
    DECODER_KEYS,
    vocab_size=256000,
    hidden_size=3072,
    intermediate_size=24576,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=Key(256),
    tie_word_embeddings=True,
    attention_bias=Key(False, "flag"),
)

_SLIDING = keys(
    _KEYS,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    sliding_window=Key(4096, "count", nullable=True),
    layer_types=Key(None, "words", nullable=True),
)

_CAUSAL: dict[str, tuple[object, ...]] = {"use_bidirectional_attention": (False,), "mlp_bias": (False,)}

FAMILIES = (
    Family(
        name="gemma",
        config_class="GemmaConfig",
        architectures=("GemmaForCausalLM",),
        keys=_KEYS,
        build=_gemma,
        fixed=_CAUSAL,
    ),
    Family(
        name="gemma2",
        config_class="Gemma2Config",
        architectures=("Gemma2ForCausalLM",),
        keys=_SLIDING,
        build=_gemma2,
        ignored=names("query_pre_attn_scalar final_logit_softcapping attn_logit_softcapping sliding_window_size"),
        fixed=_CAUSAL,
    ),
    Family(
        name="gemma3_text",
        config_class="Gemma3TextConfig",
        architectures=("Gemma3ForCausalLM", "Gemma3TextForCausalLM"),
        keys=keys(_SLIDING, vocab_size=262208, sliding_window_pattern=Key(6, aliases=("_sliding_window_pattern",))),
        build=_gemma3,
        ignored=names("query_pre_attn_scalar final_logit_softcapping attn_logit_softcapping mm_tokens_per_image"),
        fixed=_CAUSAL,
    ),
)
