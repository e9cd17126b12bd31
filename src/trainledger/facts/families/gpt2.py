"""GPT-2: learned positions, LayerNorms, biases everywhere, tied output.

Its `Conv1D` layers keep the weight as `[in, out]`, the transpose of a Linear: c_attn and c_fc are cut on dimension 1,
the two c_proj on dimension 0.
"""

from __future__ import annotations

from trainledger.facts.families.common import Heads, blocks_of, embedding, even_heads, norm, positions, stack
from trainledger.facts.families.keys import Family, Key, Parts, Values, names
from trainledger.facts.model import Block, Mlp, Role, Tensor


def _conv1d(
    name: str, in_features: int, out_features: int, role: Role, *, tp_dim: int, tp_units: int = 0
) -> tuple[Tensor, Tensor]:
    cut = tp_dim == 1
    return (
        Tensor(
            name=f"{name}.weight",
            shape=(in_features, out_features),
            role=role,
            tp_dim=tp_dim,
            tp_units=tp_units,
            linear=True,
        ),
        Tensor(
            name=f"{name}.bias",
            shape=(out_features,),
            role=role,
            tp_dim=0 if cut else None,
            tp_units=tp_units if cut else 0,
        ),
    )


def build(values: Values) -> Parts:
    """Blocks of a GPT-2."""
    hidden, count = values.dim("n_embd"), values.dim("n_head")
    heads = Heads(hidden, count, count, even_heads(values, "n_embd", "n_head"))
    width = values.maybe("n_inner") or 4 * hidden
    rows = values.dim("n_positions")

    def block(_kind: str, at: tuple[int, ...]) -> Block:
        return Block(
            kind="dense",
            layers=at,
            tensors=(
                *norm("ln_1", hidden, bias=True),
                *_conv1d("attn.c_attn", hidden, 3 * hidden, "attention", tp_dim=1, tp_units=count),
                *_conv1d("attn.c_proj", hidden, hidden, "attention", tp_dim=0, tp_units=count),
                *norm("ln_2", hidden, bias=True),
                *_conv1d("mlp.c_fc", hidden, width, "mlp", tp_dim=1),
                *_conv1d("mlp.c_proj", width, hidden, "mlp", tp_dim=0),
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
        name="gpt2",
        config_class="GPT2Config",
        architectures=("GPT2LMHeadModel", "GPT2ForCausalLM"),
        keys={
            "vocab_size": Key(50257),
            "n_positions": Key(1024, aliases=("max_position_embeddings",)),
            "n_embd": Key(768, aliases=("hidden_size",)),
            "n_layer": Key(12, aliases=("num_hidden_layers",)),
            "n_head": Key(12, aliases=("num_attention_heads",)),
            "n_inner": Key(None, nullable=True),
            "tie_word_embeddings": Key(True, "flag"),
        },
        build=build,
        ignored=names(
            "n_ctx summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout "
            "scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn n_special output_past "
            "predict_special_tokens embd_drop attn_drop resid_drop alpha"
        ),
    ),
)
