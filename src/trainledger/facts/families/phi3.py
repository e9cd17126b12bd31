"""Phi-3 and Phi-4: a Llama block with q, k, v in one matrix and gate and up in another, without biases."""

from __future__ import annotations

from trainledger.facts.families.common import DECODER_KEYS, blocks_of, fused_qkv, label, linear, norm, read_heads, stack
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, names
from trainledger.facts.model import Block, Mlp


def build(values: Values) -> Parts:
    """Blocks of a Phi-3; the layer registers the output projection before q, k, v."""
    heads = read_heads(values)
    hidden, width = heads.hidden, values.dim("intermediate_size")
    qkv, out = fused_qkv("self_attn.qkv_proj", heads, out="self_attn.o_proj")

    def block(window: int | None, at: tuple[int, ...]) -> Block:
        return Block(
            kind=label("dense", window),
            layers=at,
            tensors=(
                out,
                qkv,
                *linear("mlp.gate_up_proj", 2 * width, hidden, "mlp", tp_dim=0, tp_units=width),
                *linear("mlp.down_proj", hidden, width, "mlp", tp_dim=1),
                *norm("input_layernorm", hidden),
                *norm("post_attention_layernorm", hidden),
            ),
            norms=2,
            attention=heads.attention(window=window),
            mlp=Mlp(intermediate=width, gated=True),
        )

    window = values.maybe("sliding_window") or None
    return stack(values, blocks_of([window] * values.dim("num_hidden_layers"), block))


FAMILIES = (
    Family(
        name="phi3",
        config_class="Phi3Config",
        architectures=("Phi3ForCausalLM",),
        keys=keys(
            DECODER_KEYS,
            vocab_size=32064,
            hidden_size=3072,
            intermediate_size=8192,
            sliding_window=Key(None, "count", nullable=True),
        ),
        build=build,
        ignored=names("full_attn_mod interpolate_factor"),
        fixed={"attention_bias": (False,), "mlp_bias": (False,), "lm_head_bias": (False,)},
    ),
)
