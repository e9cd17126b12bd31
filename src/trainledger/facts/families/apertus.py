"""Apertus: RMSNorms over the head size of q and k, and two matrices around an xIELU that learns two numbers.

Its checkpoints call the norms attention_layernorm and feedforward_layernorm. `beta` and `eps` of xIELU are buffers and
are not counted.
"""

from __future__ import annotations

from trainledger.facts.families.common import (
    DECODER_KEYS,
    attention,
    blocks_of,
    norm,
    plain_mlp,
    qk_norms,
    read_heads,
    stack,
)
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, names
from trainledger.facts.model import Block, Mlp, Tensor


def build(values: Values) -> Parts:
    """Blocks of an Apertus: all are of one kind."""
    heads = read_heads(values)
    hidden, width, bias = heads.hidden, values.dim("intermediate_size"), values.flag("attention_bias")
    learned = tuple(Tensor(name=f"mlp.act_fn.{name}", shape=(1,), role="mlp") for name in ("alpha_p", "alpha_n"))
    tensors = (
        *attention("self_attn", heads, qkv_bias=bias, out_bias=bias),
        *qk_norms(heads),
        *plain_mlp("mlp.up_proj", "mlp.down_proj", hidden, width),
        *learned,
        *norm("attention_layernorm", hidden),
        *norm("feedforward_layernorm", hidden),
    )

    def block(_kind: str, at: tuple[int, ...]) -> Block:
        return Block(
            kind="dense",
            layers=at,
            tensors=tensors,
            norms=2,
            attention=heads.attention(qk_norm=True),
            mlp=Mlp(intermediate=width, gated=False),
        )

    return stack(values, blocks_of(["dense"] * values.dim("num_hidden_layers"), block))


FAMILIES = (
    Family(
        name="apertus",
        config_class="ApertusConfig",
        architectures=("ApertusForCausalLM",),
        keys=keys(
            DECODER_KEYS,
            vocab_size=131072,
            intermediate_size=14336,
            attention_bias=Key(False, "flag"),
        ),
        build=build,
        ignored=names("post_norm"),
        fixed={"mlp_bias": (False,), "qk_norm": (True,)},
    ),
)
