"""GPT-NeoX and Pythia."""

from __future__ import annotations

from trainledger.facts.model import Model
from trainledger.facts.semantics import BlockRule, EntryRule, ExitRule, MlpRule, Semantics
from trainledger.runtime.model.config import Config
from trainledger.runtime.model.families.common import attentions, each_layer, layer_norm, rope_values, rotary


def read(model: Model, config: Config) -> Semantics:
    """Fused q, k, v by head; attention and network in parallel, each behind a norm of its own."""
    config.ignore("weight_tying")
    values = rope_values(config, fraction=config.number("rotary_pct", 0.25), theta_key="rotary_emb_base")
    head_dim = each_layer(model)[0].qk_head_dim
    parallel = config.flag("use_parallel_residual", default=True)
    return Semantics(
        norm=layer_norm(config, "layer_norm_eps"),
        attention=attentions(model, path="attention", qkv="groups", fused="query_key_value", out="dense"),
        rotary={"rotary": rotary(config, values, head_dim, model)},
        block=BlockRule(residual="parallel" if parallel else "chain"),
        mlp=MlpRule(
            kind="plain",
            activation=config.activation("gelu", "hidden_act"),
            up="dense_h_to_4h",
            down="dense_4h_to_h",
        ),
        entry=EntryRule(tokens="gpt_neox.embed_in"),
        exit=ExitRule(norm="gpt_neox.final_layer_norm", head="embed_out"),
    )
