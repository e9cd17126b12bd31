"""StarCoder2: LayerNorms with biases, separate q, k, v, a network without a gate named like GPT-2's."""

from __future__ import annotations

from trainledger.facts.families.common import (
    DECODER_KEYS,
    attention,
    blocks_of,
    label,
    norm,
    plain_mlp,
    read_heads,
    stack,
)
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys
from trainledger.facts.model import Block, Mlp


def build(values: Values) -> Parts:
    """Blocks of a StarCoder2."""
    heads = read_heads(values)
    hidden, width, bias = heads.hidden, values.dim("intermediate_size"), values.flag("use_bias")

    def block(window: int | None, at: tuple[int, ...]) -> Block:
        return Block(
            kind=label("dense", window),
            layers=at,
            tensors=(
                *attention("self_attn", heads, qkv_bias=bias, out_bias=bias),
                *plain_mlp("mlp.c_fc", "mlp.c_proj", hidden, width, bias=bias),
                *norm("input_layernorm", hidden, bias=True),
                *norm("post_attention_layernorm", hidden, bias=True),
            ),
            norms=2,
            attention=heads.attention(window=window),
            mlp=Mlp(intermediate=width, gated=False),
        )

    window = values.maybe("sliding_window") or None
    return stack(
        values,
        blocks_of([window] * values.dim("num_hidden_layers"), block),
        last=norm("model.norm", hidden, bias=True),
    )


FAMILIES = (
    Family(
        name="starcoder2",
        config_class="Starcoder2Config",
        architectures=("Starcoder2ForCausalLM",),
        keys=keys(
            DECODER_KEYS,
            vocab_size=49152,
            hidden_size=3072,
            intermediate_size=12288,
            num_hidden_layers=30,
            num_attention_heads=24,
            num_key_value_heads=2,
            sliding_window=Key(None, "count", nullable=True),
            use_bias=Key(True, "flag"),
            tie_word_embeddings=True,
        ),
        build=build,
        fixed={"mlp_type": ("default",), "norm_type": ("layer_norm",)},
    ),
)
