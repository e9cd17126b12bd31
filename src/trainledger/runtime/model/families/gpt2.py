"""GPT-2."""

from __future__ import annotations

import msgspec

from trainledger.facts.model import Model
from trainledger.facts.semantics import BlockRule, EntryRule, ExitRule, MlpRule, Semantics
from trainledger.runtime.model.config import Config
from trainledger.runtime.model.families.common import attentions, layer_norm


def read(model: Model, config: Config) -> Semantics:
    """Learned positions, matrices kept as [in, out], q, k and v one after the other in one of them.

    reorder_and_upcast_attn changes only how eager attention rounds.
    """
    config.ignore(
        "n_ctx",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
        "n_special",
        "output_past",
        "predict_special_tokens",
        "alpha",
        "reorder_and_upcast_attn",
    )
    rules = attentions(model, path="attn", qkv="rows", fused="c_attn", out="c_proj", rotary=None)
    scaled = config.flag("scale_attn_weights", default=True)
    by_layer = config.flag("scale_attn_by_inverse_layer_idx")
    rules = tuple(
        msgspec.structs.replace(rule, scale=(rule.scale if scaled else 1.0) / (layer + 1 if by_layer else 1))
        for layer, rule in enumerate(rules)
    )
    return Semantics(
        norm=layer_norm(config, "layer_norm_epsilon"),
        attention=rules,
        block=BlockRule(before_attention="ln_1", before_network="ln_2"),
        mlp=MlpRule(
            kind="plain", activation=config.activation("gelu_new", "activation_function"), up="c_fc", down="c_proj"
        ),
        entry=EntryRule(tokens="transformer.wte", positions="transformer.wpe"),
        exit=ExitRule(norm="transformer.ln_f"),
        transposed=True,
    )
