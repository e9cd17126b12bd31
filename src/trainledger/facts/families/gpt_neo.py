"""GPT-Neo: GPT-2's block with separate q, k and v without biases, global and local attention in turn."""

from __future__ import annotations

from trainledger.facts.families.common import (
    Heads,
    attention,
    blocks_of,
    check_length,
    embedding,
    even_heads,
    label,
    linear,
    norm,
    plain_mlp,
    positions,
    stack,
)
from trainledger.facts.families.keys import Family, Key, Parts, Values, names, one_of
from trainledger.facts.model import Block, Mlp

_KINDS = ("global", "local")


def _windows(values: Values, layers: int) -> list[int | None]:
    runs = values.items["attention_types"]
    words = _KINDS * layers if runs is None else tuple(word for kinds, times in runs for word in kinds * times)
    if runs is not None:
        check_length(values, "attention_types", len(words), layers)
        one_of(values, "attention_types", words, _KINDS)
    return [values.dim("window_size") if word == "local" else None for word in words[:layers]]


def build(values: Values) -> Parts:
    """Blocks of a GPT-Neo; the layer registers k and v before q."""
    hidden, count, layers = values.dim("hidden_size"), values.dim("num_heads"), values.dim("num_layers")
    heads = Heads(hidden, count, count, even_heads(values, "hidden_size", "num_heads"))
    width = values.maybe("intermediate_size") or 4 * hidden
    rows = values.dim("max_position_embeddings")

    def block(window: int | None, at: tuple[int, ...]) -> Block:
        return Block(
            kind=label("dense", window),
            layers=at,
            tensors=(
                *norm("ln_1", hidden, bias=True),
                *attention("attn.attention", heads, order="kvq"),
                *linear("attn.attention.out_proj", hidden, hidden, "attention", bias=True, tp_dim=1, tp_units=count),
                *norm("ln_2", hidden, bias=True),
                *plain_mlp("mlp.c_fc", "mlp.c_proj", hidden, width, bias=True),
            ),
            norms=2,
            attention=heads.attention(window=window),
            mlp=Mlp(intermediate=width, gated=False),
        )

    return stack(
        values,
        blocks_of(_windows(values, layers), block),
        prefix="transformer.h.{i}.",
        first=(
            *embedding("transformer.wte", values.dim("vocab_size"), hidden),
            *positions("transformer.wpe", rows, hidden),
        ),
        last=norm("transformer.ln_f", hidden, bias=True),
        max_positions=rows,
    )


FAMILIES = (
    Family(
        name="gpt_neo",
        config_class="GPTNeoConfig",
        architectures=("GPTNeoForCausalLM",),
        keys={
            "vocab_size": Key(50257),
            "max_position_embeddings": Key(2048),
            "hidden_size": Key(2048),
            "num_layers": Key(24, aliases=("num_hidden_layers",)),
            "num_heads": Key(16, aliases=("num_attention_heads",)),
            "intermediate_size": Key(None, nullable=True),
            "attention_types": Key(None, "runs", nullable=True),
            "window_size": Key(256),
            "tie_word_embeddings": Key(True, "flag"),
        },
        build=build,
        ignored=names(
            "attention_layers embed_dropout summary_type summary_use_proj summary_activation summary_first_dropout "
            "summary_proj_to_labels"
        ),
    ),
)
