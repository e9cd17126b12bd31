"""GPT-NeoX and Pythia: fused q, k, v interleaved by head; attention and network in parallel from two LayerNorms.

The checkpoints call the output layer `embed_out`; the library's own class now calls it `lm_head`.
"""

from __future__ import annotations

from trainledger.facts.families.common import (
    DECODER_KEYS,
    Heads,
    blocks_of,
    embedding,
    even_heads,
    fused_qkv,
    norm,
    plain_mlp,
    stack,
)
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, names
from trainledger.facts.model import Block, Mlp


def build(values: Values) -> Parts:
    """Blocks of a GPT-NeoX; without `use_parallel_residual` attention and network follow each other."""
    hidden, count = values.dim("hidden_size"), values.dim("num_attention_heads")
    heads = Heads(hidden, count, count, even_heads(values, "hidden_size", "num_attention_heads"))
    width, bias = values.dim("intermediate_size"), values.flag("attention_bias")

    def block(_kind: str, at: tuple[int, ...]) -> Block:
        return Block(
            kind="dense",
            layers=at,
            tensors=(
                *norm("input_layernorm", hidden, bias=True),
                *norm("post_attention_layernorm", hidden, bias=True),
                *fused_qkv("attention.query_key_value", heads, out="attention.dense", qkv_bias=bias, out_bias=bias),
                *plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", hidden, width, bias=True),
            ),
            norms=2,
            attention=heads.attention(),
            mlp=Mlp(intermediate=width, gated=False),
            parallel=values.flag("use_parallel_residual"),
        )

    return stack(
        values,
        blocks_of(["dense"] * values.dim("num_hidden_layers"), block),
        prefix="gpt_neox.layers.{i}.",
        first=embedding("gpt_neox.embed_in", values.dim("vocab_size"), hidden),
        last=norm("gpt_neox.final_layer_norm", hidden, bias=True),
        head_name="embed_out",
    )


FAMILIES = (
    Family(
        name="gpt_neox",
        config_class="GPTNeoXConfig",
        architectures=("GPTNeoXForCausalLM",),
        keys=keys(
            {name: key for name, key in DECODER_KEYS.items() if name not in ("num_key_value_heads", "head_dim")},
            vocab_size=50432,
            hidden_size=6144,
            intermediate_size=24576,
            num_hidden_layers=44,
            num_attention_heads=64,
            attention_bias=Key(True, "flag"),
            use_parallel_residual=Key(True, "flag"),
        ),
        build=build,
        ignored=names("weight_tying"),
    ),
)
