"""Nemotron and Arcee: a Llama block whose network has no gate and squares a ReLU; Nemotron's norms have biases."""

from __future__ import annotations

from trainledger.facts.families.common import (
    DECODER_KEYS,
    attention,
    blocks_of,
    norm,
    plain_mlp,
    read_heads,
    stack,
)
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, names
from trainledger.facts.model import Block, Mlp


def _build(values: Values, *, layered: bool) -> Parts:
    heads = read_heads(values)
    hidden, width = heads.hidden, values.dim("intermediate_size")
    bias, mlp_bias = values.flag("attention_bias"), values.flag("mlp_bias")

    def block(_kind: str, at: tuple[int, ...]) -> Block:
        return Block(
            kind="dense",
            layers=at,
            tensors=(
                *attention("self_attn", heads, qkv_bias=bias, out_bias=bias),
                *plain_mlp("mlp.up_proj", "mlp.down_proj", hidden, width, bias=mlp_bias),
                *norm("input_layernorm", hidden, bias=layered),
                *norm("post_attention_layernorm", hidden, bias=layered),
            ),
            norms=2,
            attention=heads.attention(),
            mlp=Mlp(intermediate=width, gated=False),
        )

    return stack(
        values,
        blocks_of(["dense"] * values.dim("num_hidden_layers"), block),
        last=norm("model.norm", hidden, bias=layered),
    )


def _nemotron(values: Values) -> Parts:
    return _build(values, layered=True)


def _arcee(values: Values) -> Parts:
    return _build(values, layered=False)


_KEYS = keys(DECODER_KEYS, attention_bias=Key(False, "flag"), mlp_bias=Key(False, "flag"))

FAMILIES = (
    Family(
        name="nemotron",
        config_class="NemotronConfig",
        architectures=("NemotronForCausalLM",),
        keys=keys(_KEYS, vocab_size=256000, hidden_size=6144, intermediate_size=24576, num_attention_heads=48),
        build=_nemotron,
        ignored=names("rope_percent"),
    ),
    Family(
        name="arcee",
        config_class="ArceeConfig",
        architectures=("ArceeForCausalLM",),
        keys=keys(_KEYS, hidden_size=2560, intermediate_size=18432),
        build=_arcee,
    ),
)
