"""OPT: learned positions (two rows more than positions), LayerNorms with biases, ReLU network, tied output.

OPT-350M differs: post-norm (then no LayerNorm after the last layer) and token vectors narrower than the hidden size,
with a projection in and one out. Order: the projection in stands with the embedding and the one out with the head,
although the module registers both before the layers.
"""

from __future__ import annotations

from trainledger.facts.families.common import (
    Heads,
    attention,
    blocks_of,
    embedding,
    even_heads,
    head,
    linear,
    norm,
    plain_mlp,
    positions,
)
from trainledger.facts.families.keys import Family, Key, Parts, Values, names
from trainledger.facts.model import Block, Mlp

_POSITION_OFFSET = 2
"""Rows that OPTLearnedPositionalEmbedding adds before position 0."""


def build(values: Values) -> Parts:
    """Blocks of an OPT, and its two projections when the token vectors are narrower."""
    hidden, count = values.dim("hidden_size"), values.dim("num_attention_heads")
    heads = Heads(hidden, count, count, even_heads(values, "hidden_size", "num_attention_heads"))
    width, bias = values.dim("ffn_dim"), values.flag("enable_bias")
    affine = values.flag("layer_norm_elementwise_affine")
    tokens = values.maybe("word_embed_proj_dim") or hidden
    vocab, rows = values.dim("vocab_size"), values.dim("max_position_embeddings")
    tied = values.flag("tie_word_embeddings")
    narrow = tokens != hidden
    last_norm = values.flag("do_layer_norm_before") and not values.flag("_remove_final_layer_norm")

    def block(_kind: str, at: tuple[int, ...]) -> Block:
        return Block(
            kind="dense",
            layers=at,
            tensors=(
                *attention("self_attn", heads, qkv_bias=bias, out_bias=bias, out="out_proj", order="kvqo"),
                *(norm("self_attn_layer_norm", hidden, bias=True) if affine else ()),
                *plain_mlp("fc1", "fc2", hidden, width, bias=bias),
                *(norm("final_layer_norm", hidden, bias=True) if affine else ()),
            ),
            norms=2,
            attention=heads.attention(),
            mlp=Mlp(intermediate=width, gated=False),
            keeps_end=not values.flag("do_layer_norm_before"),
        )

    return Parts(
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=values.dim("num_hidden_layers"),
        max_positions=rows,
        layer_prefix="model.decoder.layers.{i}.",
        embedding=(
            *embedding("model.decoder.embed_tokens", vocab, tokens),
            *positions("model.decoder.embed_positions", rows + _POSITION_OFFSET, hidden),
            *(linear("model.decoder.project_in", hidden, tokens, "embedding") if narrow else ()),
        ),
        blocks=blocks_of(["dense"] * values.dim("num_hidden_layers"), block),
        final=(
            *(norm("model.decoder.final_layer_norm", hidden, bias=True) if last_norm and affine else ()),
            *(linear("model.decoder.project_out", tokens, hidden, "head") if narrow else ()),
            *head(vocab, tokens, tied=tied),
        ),
        tied=tied,
    )


FAMILIES = (
    Family(
        name="opt",
        config_class="OPTConfig",
        architectures=("OPTForCausalLM",),
        keys={
            "vocab_size": Key(50272),
            "hidden_size": Key(768),
            "num_hidden_layers": Key(12),
            "ffn_dim": Key(3072),
            "num_attention_heads": Key(12),
            "max_position_embeddings": Key(2048),
            "word_embed_proj_dim": Key(None, nullable=True),
            "do_layer_norm_before": Key(True, "flag"),
            "_remove_final_layer_norm": Key(False, "flag"),
            "enable_bias": Key(True, "flag"),
            "layer_norm_elementwise_affine": Key(True, "flag"),
            "tie_word_embeddings": Key(True, "flag"),
        },
        build=build,
        ignored=names("layerdrop scale_embedding output_projection"),
    ),
)
