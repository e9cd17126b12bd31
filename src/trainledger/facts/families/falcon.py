"""Falcon: three layouts of fused q, k, v, and one or two LayerNorms behind attention and network in parallel.

New decoder (40B, 180B): groups of query heads, each with its k and v, and two LayerNorms unless the config says one.
Multi-query (7B): all query heads, then one k and one v, so TP cannot cut the fused matrix. Neither (RW): as many
k and v as heads, ALiBi, biases, attention and network one after the other.
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
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, names, without
from trainledger.facts.model import Block, Mlp


def _heads(values: Values) -> Heads:
    heads = values.dim("num_attention_heads")
    size = even_heads(values, "hidden_size", "num_attention_heads")
    kv_heads = heads
    if values.flag("new_decoder_architecture"):
        kv_heads = values.maybe("num_kv_heads") or heads
        if heads % kv_heads:
            raise values.refuse(
                "num_kv_heads",
                f"it must divide num_attention_heads={heads}, since each KV head serves a group of heads",
                f"--set num_kv_heads=N with N a divisor of {heads}",
            )
    elif values.flag("multi_query"):
        kv_heads = 1
    return Heads(values.dim("hidden_size"), heads, kv_heads, size)


def _norm_names(values: Values) -> tuple[str, ...]:
    """In the order of registration, which puts them after attention and network."""
    if not values.flag("parallel_attn"):
        return ("post_attention_layernorm", "input_layernorm")
    count = values.maybe("num_ln_in_parallel_attn")
    if count is None and values.flag("new_decoder_architecture"):
        count = 2
    return ("ln_attn", "ln_mlp") if count == 2 else ("input_layernorm",)


def build(values: Values) -> Parts:
    """Blocks of a Falcon."""
    heads = _heads(values)
    hidden, bias = heads.hidden, values.flag("bias")
    width = values.maybe("ffn_hidden_size") or 4 * hidden
    norm_names = _norm_names(values)

    def block(_kind: str, at: tuple[int, ...]) -> Block:
        return Block(
            kind="dense",
            layers=at,
            tensors=(
                *fused_qkv(
                    "self_attention.query_key_value",
                    heads,
                    out="self_attention.dense",
                    qkv_bias=bias,
                    out_bias=bias,
                ),
                *plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", hidden, width, bias=bias),
                *(tensor for name in norm_names for tensor in norm(name, hidden, bias=True)),
            ),
            norms=len(norm_names),
            attention=heads.attention(scores=("alibi",) if values.flag("alibi") else ()),
            mlp=Mlp(intermediate=width, gated=False),
            parallel=values.flag("parallel_attn"),
        )

    return stack(
        values,
        blocks_of(["dense"] * values.dim("num_hidden_layers"), block),
        prefix="transformer.h.{i}.",
        first=embedding("transformer.word_embeddings", values.dim("vocab_size"), hidden),
        last=norm("transformer.ln_f", hidden, bias=True),
        bounded=not values.flag("alibi"),
    )


FAMILIES = (
    Family(
        name="falcon",
        config_class="FalconConfig",
        architectures=("FalconForCausalLM",),
        keys=keys(
            without(DECODER_KEYS, "num_key_value_heads", "head_dim", "intermediate_size"),
            vocab_size=65024,
            hidden_size=Key(4544, aliases=("n_embed",)),
            num_attention_heads=71,
            num_kv_heads=Key(None, nullable=True),
            num_ln_in_parallel_attn=Key(None, nullable=True),
            alibi=Key(False, "flag", nullable=True),
            new_decoder_architecture=Key(False, "flag", nullable=True),
            multi_query=Key(True, "flag", nullable=True),
            parallel_attn=Key(True, "flag", nullable=True),
            bias=Key(False, "flag", nullable=True),
            ffn_hidden_size=Key(None, nullable=True),
            tie_word_embeddings=True,
        ),
        build=build,
        ignored=names("apply_residual_connection_post_layernorm ff_factor"),
    ),
)
