"""GPT-J."""

from __future__ import annotations

from trainledger.facts.model import Model
from trainledger.facts.semantics import BlockRule, EntryRule, ExitRule, MlpRule, RotaryRule, Semantics
from trainledger.runtime.model.config import Config
from trainledger.runtime.model.families.common import attentions, each_layer, layer_norm


def read(model: Model, config: Config) -> Semantics:
    """Attention and network in parallel behind one norm; rotary positions in the first `rotary_dim` features."""
    config.ignore(
        "rotary",
        "n_ctx",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
        "scale_attn_weights",
    )
    head_dim = each_layer(model)[0].qk_head_dim
    dim = config.whole("rotary_dim", 64)
    if not 0 < dim <= head_dim or dim % 2:
        raise config.refuse("rotary_dim", dim, f"an even number up to the head size {head_dim}")
    return Semantics(
        norm=layer_norm(config, "layer_norm_epsilon"),
        attention=attentions(model, path="attn", out="out_proj"),
        rotary={"rotary": RotaryRule(dim=dim, theta=10000.0, interleaved=True)},
        block=BlockRule(residual="parallel", before_attention="ln_1", before_network="ln_1"),
        mlp=MlpRule(
            kind="plain", activation=config.activation("gelu_new", "activation_function"), up="fc_in", down="fc_out"
        ),
        entry=EntryRule(tokens="transformer.wte"),
        exit=ExitRule(norm="transformer.ln_f"),
    )
