"""MPT: ALiBi, fused q, k, v, LayerNorms without biases, no bias anywhere, a network four times as wide.

Of `attn_config` nothing changes a shape in this class: grouped heads and norms of q and k are the remote code's alone.
"""

from __future__ import annotations

from trainledger.facts.families.common import Heads, blocks_of, embedding, even_heads, fused_qkv, norm, plain_mlp, stack
from trainledger.facts.families.keys import Family, Key, Parts, Values, names
from trainledger.facts.model import Block, Mlp


def build(values: Values) -> Parts:
    """Blocks of an MPT."""
    hidden, count = values.dim("d_model"), values.dim("n_heads")
    heads = Heads(hidden, count, count, even_heads(values, "d_model", "n_heads"))
    width = 4 * hidden

    def block(_kind: str, at: tuple[int, ...]) -> Block:
        return Block(
            kind="dense",
            layers=at,
            tensors=(
                *norm("norm_1", hidden),
                *fused_qkv("attn.Wqkv", heads, out="attn.out_proj"),
                *norm("norm_2", hidden),
                *plain_mlp("ffn.up_proj", "ffn.down_proj", hidden, width),
            ),
            norms=2,
            attention=heads.attention(scores=("alibi",)),
            mlp=Mlp(intermediate=width, gated=False),
        )

    return stack(
        values,
        blocks_of(["dense"] * values.dim("n_layers"), block),
        prefix="transformer.blocks.{i}.",
        first=embedding("transformer.wte", values.dim("vocab_size"), hidden),
        last=norm("transformer.norm_f", hidden),
        hidden_key="d_model",
        bounded=False,
    )


FAMILIES = (
    Family(
        name="mpt",
        config_class="MptConfig",
        architectures=("MptForCausalLM", "MPTForCausalLM"),
        keys={
            "vocab_size": Key(50368),
            "d_model": Key(2048, aliases=("hidden_size",)),
            "n_heads": Key(16, aliases=("num_attention_heads",)),
            "n_layers": Key(24, aliases=("num_hidden_layers",)),
            "tie_word_embeddings": Key(True, "flag"),
        },
        build=build,
        ignored=names(
            "max_seq_len attn_config ffn_config init_config init_device learned_pos_emb logit_scale norm_type verbose "
            "embedding_fraction emb_pdrop resid_pdrop tokenizer_name fc_type use_pad_tok_in_ffn"
        ),
        fixed={"expansion_ratio": (4,), "no_bias": (True,)},
    ),
)
