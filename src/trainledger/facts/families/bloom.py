"""BLOOM: ALiBi (so no positions to learn or to bound), fused q, k, v by head, LayerNorm after the embedding."""

from __future__ import annotations

from trainledger.facts.families.common import Heads, blocks_of, embedding, even_heads, fused_qkv, norm, plain_mlp, stack
from trainledger.facts.families.keys import Family, Key, Parts, Values, names
from trainledger.facts.model import Block, Mlp


def build(values: Values) -> Parts:
    """Blocks of a BLOOM; the network is always four times the hidden size."""
    hidden, count = values.dim("hidden_size"), values.dim("n_head")
    heads = Heads(hidden, count, count, even_heads(values, "hidden_size", "n_head"))
    inner = values.maybe("n_inner")
    if inner not in (None, 4 * hidden):
        raise values.refuse("n_inner", f"BloomMLP is always 4 x hidden_size = {4 * hidden}", "--set n_inner=null")

    def block(_kind: str, at: tuple[int, ...]) -> Block:
        return Block(
            kind="dense",
            layers=at,
            tensors=(
                *norm("input_layernorm", hidden, bias=True),
                *fused_qkv(
                    "self_attention.query_key_value",
                    heads,
                    out="self_attention.dense",
                    qkv_bias=True,
                    out_bias=True,
                ),
                *norm("post_attention_layernorm", hidden, bias=True),
                *plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", hidden, 4 * hidden, bias=True),
            ),
            norms=2,
            attention=heads.attention(scores=("alibi",)),
            mlp=Mlp(intermediate=4 * hidden, gated=False),
        )

    return stack(
        values,
        blocks_of(["dense"] * values.dim("n_layer"), block),
        prefix="transformer.h.{i}.",
        first=(
            *embedding("transformer.word_embeddings", values.dim("vocab_size"), hidden),
            *norm("transformer.word_embeddings_layernorm", hidden, bias=True),
        ),
        last=norm("transformer.ln_f", hidden, bias=True),
    )


FAMILIES = (
    Family(
        name="bloom",
        config_class="BloomConfig",
        architectures=("BloomForCausalLM", "BloomModel"),
        keys={
            "vocab_size": Key(250880),
            "hidden_size": Key(64, aliases=("n_embed",)),
            "n_layer": Key(2, aliases=("num_hidden_layers",)),
            "n_head": Key(8, aliases=("num_attention_heads",)),
            "n_inner": Key(None, nullable=True),
            "tie_word_embeddings": Key(True, "flag"),
        },
        build=build,
        ignored=names(
            "apply_residual_connection_post_layernorm slow_but_exact offset_alibi attention_softmax_in_fp32 "
            "bias_dropout_fusion masked_softmax_fusion skip_bias_add skip_bias_add_qkv"
        ),
    ),
)
