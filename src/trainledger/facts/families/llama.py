"""Llama and the families that keep its block: Mistral, Granite.

RMSNorm, attention with separate projections, RMSNorm, SwiGLU. Mistral has no biases and a sliding window that its
config class sets unless the config says null; Granite only multiplies activations by constants.
"""

from __future__ import annotations

from trainledger.facts.families.common import (
    DECODER_KEYS,
    attention,
    blocks_of,
    gated_mlp,
    label,
    norm,
    read_heads,
    stack,
)
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, names
from trainledger.facts.model import Block, Mlp


def build(values: Values) -> Parts:
    """Blocks of a Llama; a key that the family does not read counts as false or null."""
    heads = read_heads(values)
    width = values.dim("intermediate_size")
    bias = values.flag("attention_bias")
    mlp_bias = values.flag("mlp_bias")
    window = values.maybe("sliding_window") or None

    def block(window: int | None, layers: tuple[int, ...]) -> Block:
        return Block(
            kind=label("dense", window),
            layers=layers,
            tensors=(
                *attention("self_attn", heads, qkv_bias=bias, out_bias=bias),
                *gated_mlp("mlp", heads.hidden, width, bias=mlp_bias),
                *norm("input_layernorm", heads.hidden),
                *norm("post_attention_layernorm", heads.hidden),
            ),
            norms=2,
            attention=heads.attention(window=window),
            mlp=Mlp(intermediate=width, gated=True),
        )

    return stack(values, blocks_of([window] * values.dim("num_hidden_layers"), block))


_BIASES = {"attention_bias": Key(False, "flag"), "mlp_bias": Key(False, "flag")}

FAMILIES = (
    Family(
        name="llama",
        config_class="LlamaConfig",
        architectures=("LlamaForCausalLM",),
        keys=keys(DECODER_KEYS, **_BIASES),
        build=build,
    ),
    Family(
        name="mistral",
        config_class="MistralConfig",
        architectures=("MistralForCausalLM",),
        keys=keys(
            DECODER_KEYS,
            intermediate_size=14336,
            num_key_value_heads=8,
            sliding_window=Key(4096, "count", nullable=True),
        ),
        build=build,
        fixed={"attention_bias": (False,), "mlp_bias": (False,)},
    ),
    Family(
        name="granite",
        config_class="GraniteConfig",
        architectures=("GraniteForCausalLM",),
        keys=keys(DECODER_KEYS, **_BIASES),
        build=build,
        ignored=names("embedding_multiplier logits_scaling residual_multiplier attention_multiplier"),
    ),
)
