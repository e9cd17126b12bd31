"""GPT-J: attention and network in parallel behind one LayerNorm; an output layer with a bias."""

from __future__ import annotations

from trainledger.facts.families.common import Heads, attention, blocks_of, embedding, even_heads, norm, plain_mlp, stack
from trainledger.facts.families.keys import Family, Key, Parts, Values, names
from trainledger.facts.model import Block, Mlp


def build(values: Values) -> Parts:
    """Blocks of a GPT-J."""
    hidden, count = values.dim("n_embd"), values.dim("n_head")
    heads = Heads(hidden, count, count, even_heads(values, "n_embd", "n_head"))
    width = values.maybe("n_inner") or 4 * hidden

    def block(_kind: str, at: tuple[int, ...]) -> Block:
        return Block(
            kind="dense",
            layers=at,
            tensors=(
                *norm("ln_1", hidden, bias=True),
                *attention("attn", heads, out="out_proj", order="kvqo"),
                *plain_mlp("mlp.fc_in", "mlp.fc_out", hidden, width, bias=True),
            ),
            norms=1,
            attention=heads.attention(),
            mlp=Mlp(intermediate=width, gated=False),
            parallel=True,
        )

    return stack(
        values,
        blocks_of(["dense"] * values.dim("n_layer"), block),
        prefix="transformer.h.{i}.",
        first=embedding("transformer.wte", values.dim("vocab_size"), hidden),
        last=norm("transformer.ln_f", hidden, bias=True),
        head_bias=True,
        hidden_key="n_embd",
        max_positions=values.maybe("n_positions"),
    )


FAMILIES = (
    Family(
        name="gptj",
        config_class="GPTJConfig",
        architectures=("GPTJForCausalLM",),
        keys={
            "vocab_size": Key(50400),
            "n_positions": Key(None, nullable=True, aliases=("max_position_embeddings",)),
            "n_embd": Key(4096, aliases=("hidden_size",)),
            "n_layer": Key(28, aliases=("num_hidden_layers",)),
            "n_head": Key(16, aliases=("num_attention_heads",)),
            "n_inner": Key(None, nullable=True),
            "tie_word_embeddings": Key(False, "flag"),
        },
        build=build,
        ignored=names(
            "rotary rotary_dim n_ctx summary_type summary_use_proj summary_activation summary_proj_to_labels "
            "summary_first_dropout scale_attn_weights"
        ),
    ),
)
