"""Falcon, in its three layouts."""

from __future__ import annotations

from typing import Literal

from trainledger.errors import Refused
from trainledger.facts.model import Model
from trainledger.facts.semantics import BlockRule, EntryRule, ExitRule, MlpRule, Semantics
from trainledger.runtime.model.config import Config
from trainledger.runtime.model.families.common import attentions, each_layer, layer_norm, rope_values, rotary


def read(model: Model, config: Config) -> Semantics:
    """Fused q, k, v by group of heads, or with one k and v at the end; ALiBi over the root of the head size, or rotary.

    FalconModel reads apply_residual_connection_post_layernorm nowhere.
    """
    config.ignore("apply_residual_connection_post_layernorm", "ff_factor")
    facts = each_layer(model)[0]
    alibi = config.flag("alibi")
    one = config.flag("multi_query", default=True) and not config.flag("new_decoder_architecture")
    layout: Literal["rows", "groups"] = "rows" if one else "groups"
    rules = attentions(
        model,
        path="self_attention",
        qkv=layout,
        fused="query_key_value",
        out="dense",
        rotary=None if alibi else "rotary",
        alibi=facts.qk_head_dim**-0.5 if alibi else 0.0,
    )
    turn = rotary(config, rope_values(config), facts.qk_head_dim, model)
    return Semantics(
        norm=layer_norm(config, "layer_norm_epsilon"),
        attention=rules,
        rotary={"rotary": turn},
        block=_block(model, config),
        mlp=MlpRule(
            kind="plain",
            activation=config.activation("gelu", "activation"),
            up="dense_h_to_4h",
            down="dense_4h_to_h",
        ),
        entry=EntryRule(tokens="transformer.word_embeddings"),
        exit=ExitRule(norm="transformer.ln_f"),
    )


def _block(model: Model, config: Config) -> BlockRule:
    new = config.flag("new_decoder_architecture")
    if not config.flag("parallel_attn", default=True):
        if new:
            raise _broken(model, "parallel_attn=false with new_decoder_architecture=true", "--set parallel_attn=true")
        return BlockRule()
    norms = config.whole("num_ln_in_parallel_attn", 2 if new else 1)
    if norms != 2:
        return BlockRule(residual="parallel", before_network="input_layernorm")
    if not new:
        raise _broken(model, "num_ln_in_parallel_attn=2 without the new decoder", "--set num_ln_in_parallel_attn=1")
    return BlockRule(residual="parallel", before_attention="ln_attn", before_network="ln_mlp")


def _broken(model: Model, what: str, knob: str) -> Refused:
    return Refused("runtime-config", f"{model.name}: {what} has no forward pass in FalconDecoderLayer; {knob}")
