"""GLM-4: grouped attention with biases on q, k and v only, gate and up in one matrix.

The 0414 release (glm4) also normalises what attention and network give back.
"""

from __future__ import annotations

from trainledger.facts.families.common import (
    DECODER_KEYS,
    attention,
    blocks_of,
    linear,
    norm,
    read_heads,
    stack,
)
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys
from trainledger.facts.model import Block, Mlp

_BEFORE = ("input_layernorm", "post_attention_layernorm")
_AFTER = ("post_self_attn_layernorm", "post_mlp_layernorm")


def _build(values: Values, norm_names: tuple[str, ...]) -> Parts:
    heads = read_heads(values)
    hidden, width = heads.hidden, values.dim("intermediate_size")

    def block(_kind: str, at: tuple[int, ...]) -> Block:
        return Block(
            kind="dense",
            layers=at,
            tensors=(
                *attention("self_attn", heads, qkv_bias=values.flag("attention_bias")),
                *linear("mlp.gate_up_proj", 2 * width, hidden, "mlp", tp_dim=0, tp_units=width),
                *linear("mlp.down_proj", hidden, width, "mlp", tp_dim=1),
                *(tensor for name in norm_names for tensor in norm(name, hidden)),
            ),
            norms=len(norm_names),
            attention=heads.attention(),
            mlp=Mlp(intermediate=width, gated=True),
            keeps_end=norm_names != _BEFORE,
        )

    return stack(values, blocks_of(["dense"] * values.dim("num_hidden_layers"), block))


def _glm(values: Values) -> Parts:
    return _build(values, _BEFORE)


def _glm4(values: Values) -> Parts:
    return _build(values, (*_BEFORE, *_AFTER))


_KEYS = keys(
    DECODER_KEYS,
    vocab_size=151552,
    intermediate_size=13696,
    num_hidden_layers=40,
    num_key_value_heads=2,
    head_dim=Key(128),
    attention_bias=Key(True, "flag"),
)

_FIXED: dict[str, tuple[object, ...]] = {"mlp_bias": (False,)}

FAMILIES = (
    Family(
        name="glm",
        config_class="GlmConfig",
        architectures=("GlmForCausalLM",),
        keys=_KEYS,
        build=_glm,
        fixed=_FIXED,
    ),
    Family(
        name="glm4",
        config_class="Glm4Config",
        architectures=("Glm4ForCausalLM",),
        keys=_KEYS,
        build=_glm4,
        fixed=_FIXED,
    ),
)
