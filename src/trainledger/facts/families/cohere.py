"""Command R (cohere) and Command R7B / A (cohere2): attention and network in parallel behind one norm without bias.

Cohere's optional norms of q and k have a weight for each head, `[heads, head_dim]`, which TP cuts with the heads.
Cohere2 slides in three layers of four.
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


def _head_norms(heads: Heads) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(name=f"self_attn.{name}.weight", shape=(count, heads.head_dim), role="norm", tp_dim=0, tp_units=count)
        for name, count in (("q_norm", heads.heads), ("k_norm", heads.kv_heads))
    )


def _build(values: Values, kinds: tuple[int | None, ...], *, qk_norm: bool) -> Parts:
    heads = read_heads(values)
    width, bias = values.dim("intermediate_size"), values.flag("attention_bias")

    def block(window: int | None, at: tuple[int, ...]) -> Block:
        return Block(
            kind=label("dense", window),
            layers=at,
            tensors=(
                *attention("self_attn", heads, qkv_bias=bias, out_bias=bias),
                *(_head_norms(heads) if qk_norm else ()),
                *gated_mlp("mlp", heads.hidden, width),
                *norm("input_layernorm", heads.hidden),
            ),
            norms=1,
            attention=heads.attention(window=window, qk_norm=qk_norm),
            mlp=Mlp(intermediate=width, gated=True),
            parallel=True,
        )

    return stack(values, blocks_of(kinds, block))


def _cohere(values: Values) -> Parts:
    return _build(values, (None,) * values.dim("num_hidden_layers"), qk_norm=values.flag("use_qk_norm"))


def _cohere2(values: Values) -> Parts:
    every = values.dim("sliding_window_pattern")
    kinds = windows(values, values.dim("num_hidden_layers"), lambda index: (index + 1) % every != 0)
    return _build(values, kinds, qk_norm=False)


_KEYS = keys(
    DECODER_KEYS,
    vocab_size=256000,
    hidden_size=8192,
    intermediate_size=22528,
    num_hidden_layers=40,
    num_attention_heads=64,
    tie_word_embeddings=True,
    attention_bias=Key(False, "flag"),
)

_IGNORED = names(
    "logit_scale position_embedding_type use_embedding_sharing use_gated_activation use_parallel_block "
    "use_parallel_embedding layer_switch order_of_interleaved_layers rotary_embedding"
)

FAMILIES = (
    Family(
        name="cohere",
        config_class="CohereConfig",
        architectures=("CohereForCausalLM",),
        keys=keys(_KEYS, use_qk_norm=Key(False, "flag", nullable=True)),
        build=_cohere,
        ignored=_IGNORED,
        fixed={"mlp_bias": (False,)},
    ),
    Family(
        name="cohere2",
        config_class="Cohere2Config",
        architectures=("Cohere2ForCausalLM",),
        keys=keys(
            _KEYS,
            sliding_window=Key(4096, "count", nullable=True),
            sliding_window_pattern=Key(4, aliases=("_sliding_window_pattern",)),
            layer_types=Key(None, "words", nullable=True),
        ),
        build=_cohere2,
        ignored=_IGNORED,
        fixed={"mlp_bias": (False,), "use_qk_norm": (False,)},
    ),
)
