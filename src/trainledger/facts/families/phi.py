"""Phi-1, Phi-1.5 and Phi-2: attention and network in parallel behind one LayerNorm, biases everywhere."""

from __future__ import annotations

from trainledger.facts.families.common import DECODER_KEYS, attention, blocks_of, norm, plain_mlp, read_heads, stack
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, names
from trainledger.facts.model import Block, Mlp


def build(values: Values) -> Parts:
    """Blocks of a Phi; the norms of q and k, when asked for, are LayerNorms over hidden size over heads."""
    heads = read_heads(values)
    hidden, width = heads.hidden, values.dim("intermediate_size")
    qk_norm = values.flag("qk_layernorm")
    size = hidden // heads.heads
    norms = (
        *norm("self_attn.q_layernorm", size, bias=True),
        *norm("self_attn.k_layernorm", size, bias=True),
    )

    def block(_kind: str, at: tuple[int, ...]) -> Block:
        return Block(
            kind="dense",
            layers=at,
            tensors=(
                *attention("self_attn", heads, qkv_bias=True, out_bias=True, out="dense"),
                *(norms if qk_norm else ()),
                *plain_mlp("mlp.fc1", "mlp.fc2", hidden, width, bias=True),
                *norm("input_layernorm", hidden, bias=True),
            ),
            norms=1,
            attention=heads.attention(qk_norm=qk_norm),
            mlp=Mlp(intermediate=width, gated=False),
            parallel=True,
        )

    return stack(
        values,
        blocks_of(["dense"] * values.dim("num_hidden_layers"), block),
        last=norm("model.final_layernorm", hidden, bias=True),
        head_bias=True,
    )


FAMILIES = (
    Family(
        name="phi",
        config_class="PhiConfig",
        architectures=("PhiForCausalLM",),
        keys=keys(
            DECODER_KEYS,
            vocab_size=51200,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=24,
            qk_layernorm=Key(False, "flag"),
        ),
        build=build,
        ignored=names("flash_rotary fused_dense"),
    ),
)
