"""BLOOM."""

from __future__ import annotations

from trainledger.facts.model import Model
from trainledger.facts.semantics import BlockRule, EntryRule, ExitRule, MlpRule, Semantics
from trainledger.runtime.model.config import Config
from trainledger.runtime.model.families.common import attentions, layer_norm


def read(model: Model, config: Config) -> Semantics:
    """ALiBi, a norm behind the embedding, fused q, k, v by head."""
    config.ignore(
        "slow_but_exact",
        "offset_alibi",
        "attention_softmax_in_fp32",
        "bias_dropout_fusion",
        "masked_softmax_fusion",
        "skip_bias_add",
        "skip_bias_add_qkv",
    )
    normed = config.flag("apply_residual_connection_post_layernorm")
    return Semantics(
        norm=layer_norm(config, "layer_norm_epsilon"),
        attention=attentions(
            model,
            path="self_attention",
            qkv="groups",
            fused="query_key_value",
            out="dense",
            rotary=None,
            alibi=1.0,
        ),
        block=BlockRule(from_normed=normed),
        mlp=MlpRule(kind="plain", activation="gelu_new", up="dense_h_to_4h", down="dense_4h_to_h"),
        entry=EntryRule(tokens="transformer.word_embeddings", norm="transformer.word_embeddings_layernorm"),
        exit=ExitRule(norm="transformer.ln_f"),
    )
