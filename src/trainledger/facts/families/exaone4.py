"""EXAONE 4: norms after attention and network as in OLMo 2, RMSNorms over the head size of q and k, sliding layers."""

from __future__ import annotations

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
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys
from trainledger.facts.model import Block, Mlp


def build(values: Values) -> Parts:
    """Blocks of an EXAONE 4; a pattern is a period, whose last layer does not slide, or its letters."""
    heads = read_heads(values)
    hidden, width, layers = heads.hidden, values.dim("intermediate_size"), values.dim("num_hidden_layers")
    pattern = values.items["sliding_window_pattern"] or 0
    every = len(pattern) if isinstance(pattern, str) else pattern

    def slides(index: int) -> bool:
        return pattern[index % every] == "L" if isinstance(pattern, str) else every > 0 and (index + 1) % every != 0

    def block(window: int | None, at: tuple[int, ...]) -> Block:
        return Block(
            kind=label("dense", window),
            layers=at,
            tensors=(
                *attention("self_attn", heads),
                *qk_norms(heads),
                *gated_mlp("mlp", hidden, width),
                *norm("post_attention_layernorm", hidden),
                *norm("post_feedforward_layernorm", hidden),
            ),
            norms=2,
            attention=heads.attention(window=window, qk_norm=True),
            mlp=Mlp(intermediate=width, gated=True),
            keeps_end=True,
        )

    return stack(values, blocks_of(windows(values, layers, slides), block))


FAMILIES = (
    Family(
        name="exaone4",
        config_class="Exaone4Config",
        architectures=("Exaone4ForCausalLM",),
        keys=keys(
            DECODER_KEYS,
            vocab_size=102400,
            intermediate_size=16384,
            num_key_value_heads=32,
            sliding_window=Key(4096, "count", nullable=True),
            sliding_window_pattern=Key(4, "period", nullable=True),
            layer_types=Key(None, "words", nullable=True),
        ),
        build=build,
        fixed={"attention_bias": (False,), "mlp_bias": (False,)},
    ),
)
