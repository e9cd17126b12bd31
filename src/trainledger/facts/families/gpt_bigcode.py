"""GPT-BigCode (SantaCoder, StarCoder): GPT-2's block on Linear layers, all query heads before one k and one v."""

from __future__ import annotations

from trainledger.facts.families.common import (
    Heads,
    blocks_of,
    embedding,
    even_heads,
    fused_qkv,
    norm,
    plain_mlp,
    positions,
    stack,
)
from trainledger.facts.families.keys import Family, Key, Parts, Values, names
from trainledger.facts.model import Block, Mlp


def build(values: Values) -> Parts:
    """Blocks of a GPT-BigCode; without `multi_query`, as many k and v as heads."""
    hidden, count = values.dim("n_embd"), values.dim("n_head")
    kv_heads = 1 if values.flag("multi_query") else count
    heads = Heads(hidden, count, kv_heads, even_heads(values, "n_embd", "n_head"))
    width = values.maybe("n_inner") or 4 * hidden
    rows = values.dim("n_positions")

    def block(_kind: str, at: tuple[int, ...]) -> Block:
        return Block(
            kind="dense",
            layers=at,
            tensors=(
                *norm("ln_1", hidden, bias=True),
                *fused_qkv("attn.c_attn", heads, out="attn.c_proj", qkv_bias=True, out_bias=True),
                *norm("ln_2", hidden, bias=True),
                *plain_mlp("mlp.c_fc", "mlp.c_proj", hidden, width, bias=True),
            ),
            norms=2,
            attention=heads.attention(),
            mlp=Mlp(intermediate=width, gated=False),
        )

    return stack(
        values,
        blocks_of(["dense"] * values.dim("n_layer"), block),
        prefix="transformer.h.{i}.",
        first=(
            *embedding("transformer.wte", values.dim("vocab_size"), hidden),
            *positions("transformer.wpe", rows, hidden),
        ),
        last=norm("transformer.ln_f", hidden, bias=True),
        hidden_key="n_embd",
        max_positions=rows,
    )


FAMILIES = (
    Family(
        name="gpt_bigcode",
        config_class="GPTBigCodeConfig",
        architectures=("GPTBigCodeForCausalLM",),
        keys={
            "vocab_size": Key(50257),
            "n_positions": Key(1024, aliases=("max_position_embeddings",)),
            "n_embd": Key(768, aliases=("hidden_size",)),
            "n_layer": Key(12, aliases=("num_hidden_layers",)),
            "n_head": Key(12, aliases=("num_attention_heads",)),
            "n_inner": Key(None, nullable=True),
            "multi_query": Key(True, "flag"),
            "tie_word_embeddings": Key(True, "flag"),
        },
        build=build,
        ignored=names(
            "attention_softmax_in_fp32 scale_attention_softmax_in_fp32 scale_attn_weights summary_activation "
            "summary_first_dropout summary_proj_to_labels summary_type summary_use_proj inference_runner "
            "validate_runner_input max_batch_size pad_key_length pre_allocate_kv_cache"
        ),
    ),
)
