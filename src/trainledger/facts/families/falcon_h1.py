"""Falcon-H1: attention and a Mamba-2 mixer read the same normalised input side by side, then a gated network.

The mixer's gated norm is an option; its multipliers change no shape. What the two keep together for the backward is not
accounted for.
"""

from __future__ import annotations

from trainledger.facts.families.common import (
    DECODER_KEYS,
    attention,
    blocks_of,
    gated_mlp,
    mamba2,
    norm,
    read_heads,
    stack,
)
from trainledger.facts.families.granite import mamba_sizes
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, names
from trainledger.facts.model import Block, Mlp, Ssm, Tensor

BESIDE = "layers with attention and a state-space mixer side by side"
"""What `Model.unaccounted` calls them."""


def _mixer(values: Values, hidden: int) -> tuple[tuple[Tensor, ...], Ssm]:
    given = values.maybe("mamba_d_ssm")
    width = values.dim("mamba_expand") * hidden if given is None else given
    ssm = mamba_sizes(values, width)
    tensors = mamba2(
        "mamba",
        hidden,
        ssm,
        intermediate=width,
        bias=values.flag("mamba_proj_bias"),
        conv_bias=values.flag("mamba_conv_bias"),
        norm_weight=values.flag("mamba_rms_norm"),
        out_bias=values.flag("projectors_bias"),
    )
    return tensors, ssm


def build(values: Values) -> Parts:
    """Blocks of a Falcon-H1: all are of one kind."""
    heads = read_heads(values)
    hidden, width = heads.hidden, values.dim("intermediate_size")
    bias = values.flag("attention_bias")
    mixer, ssm = _mixer(values, hidden)
    tensors = (
        *gated_mlp("feed_forward", hidden, width, bias=values.flag("mlp_bias")),
        *mixer,
        *attention("self_attn", heads, qkv_bias=bias, out_bias=bias),
        *norm("input_layernorm", hidden),
        *norm("pre_ff_layernorm", hidden),
    )

    def block(_kind: str, at: tuple[int, ...]) -> Block:
        return Block(
            kind="hybrid",
            layers=at,
            tensors=tensors,
            norms=2,
            attention=heads.attention(),
            ssm=ssm,
            mlp=Mlp(intermediate=width, gated=True),
        )

    return stack(
        values,
        blocks_of(["hybrid"] * values.dim("num_hidden_layers"), block),
        last=norm("model.final_layernorm", hidden),
        unaccounted=(BESIDE,),
    )


FAMILIES = (
    Family(
        name="falcon_h1",
        config_class="FalconH1Config",
        architectures=("FalconH1ForCausalLM",),
        keys=keys(
            DECODER_KEYS,
            vocab_size=128000,
            intermediate_size=14336,
            num_key_value_heads=8,
            attention_bias=Key(False, "flag"),
            mlp_bias=Key(False, "flag"),
            projectors_bias=Key(False, "flag"),
            mamba_d_ssm=Key(1024, nullable=True),
            mamba_n_heads=Key(128),
            mamba_n_groups=Key(1),
            mamba_d_state=Key(256),
            mamba_d_conv=Key(4),
            mamba_d_head=Key("auto", "dim or text"),
            mamba_expand=Key(2),
            mamba_conv_bias=Key(True, "flag"),
            mamba_proj_bias=Key(False, "flag"),
            mamba_rms_norm=Key(False, "flag"),
        ),
        build=build,
        ignored=names(
            "attention_in_multiplier attention_out_multiplier embedding_multiplier key_multiplier lm_head_multiplier "
            "mlp_multipliers ssm_in_multiplier ssm_multipliers ssm_out_multiplier mamba_chunk_size "
            "mamba_norm_before_gate mamba_use_mlp mlp_expansion_factor num_logits_to_keep time_step_limit "
            "time_step_floor time_step_max time_step_min time_step_rank layer_types layers_block_type"
        ),
        fixed={"attn_layer_indices": (None,)},
    ),
)
