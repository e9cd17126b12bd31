"""StableLM: a Llama block with LayerNorms, optional biases on q, k, v, an optional LayerNorm for each head."""

from __future__ import annotations

from trainledger.facts.families.common import (
    DECODER_KEYS,
    Heads,
    attention,
    blocks_of,
    gated_mlp,
    norm,
    read_heads,
    stack,
)
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, without
from trainledger.facts.model import Block, Mlp, Tensor


def _head_norms(heads: Heads) -> tuple[Tensor, ...]:
    """A LayerNorm without bias for each head of q and of k: here `{e}` is the head."""
    return tuple(
        Tensor(name=f"self_attn.{name}.norms.{{e}}.weight", shape=(heads.head_dim,), role="norm", copies=count)
        for name, count in (("q_layernorm", heads.heads), ("k_layernorm", heads.kv_heads))
    )


def build(values: Values) -> Parts:
    """Blocks of a StableLM; with `use_parallel_residual` there is one norm for attention and network."""
    heads = read_heads(values)
    hidden, width = heads.hidden, values.dim("intermediate_size")
    parallel, qk_norm = values.flag("use_parallel_residual"), values.flag("qk_layernorm")

    def block(_kind: str, at: tuple[int, ...]) -> Block:
        return Block(
            kind="dense",
            layers=at,
            tensors=(
                *attention("self_attn", heads, qkv_bias=values.flag("use_qkv_bias")),
                *(_head_norms(heads) if qk_norm else ()),
                *gated_mlp("mlp", hidden, width),
                *norm("input_layernorm", hidden, bias=True),
                *(() if parallel else norm("post_attention_layernorm", hidden, bias=True)),
            ),
            norms=1 if parallel else 2,
            attention=heads.attention(qk_norm=qk_norm),
            mlp=Mlp(intermediate=width, gated=True),
            parallel=parallel,
        )

    return stack(
        values,
        blocks_of(["dense"] * values.dim("num_hidden_layers"), block),
        last=norm("model.norm", hidden, bias=True),
    )


FAMILIES = (
    Family(
        name="stablelm",
        config_class="StableLmConfig",
        architectures=("StableLmForCausalLM",),
        keys=keys(
            without(DECODER_KEYS, "head_dim"),
            vocab_size=50304,
            hidden_size=2560,
            intermediate_size=6912,
            num_key_value_heads=32,
            use_qkv_bias=Key(False, "flag"),
            qk_layernorm=Key(False, "flag"),
            use_parallel_residual=Key(False, "flag"),
        ),
        build=build,
    ),
)
