"""StableLM."""

from __future__ import annotations

from trainledger.facts.model import Model
from trainledger.facts.semantics import BlockRule, MlpRule, Semantics
from trainledger.runtime.model.config import Config
from trainledger.runtime.model.families.common import attentions, each_layer, layer_norm, rope_values, rotary


def read(model: Model, config: Config) -> Semantics:
    """LayerNorms, rotary positions in a quarter of each head, perhaps a norm of its own for each head of q and k."""
    facts = each_layer(model)[0]
    parallel = config.flag("use_parallel_residual")
    return Semantics(
        norm=layer_norm(config, "layer_norm_eps"),
        attention=attentions(
            model,
            qk_norm="head" if facts.qk_norm else "none",
            q_norm="q_layernorm.norms.*",
            k_norm="k_layernorm.norms.*",
        ),
        rotary={"rotary": rotary(config, rope_values(config, fraction=0.25), facts.qk_head_dim, model)},
        block=BlockRule(residual="parallel", before_network="input_layernorm") if parallel else BlockRule(),
        mlp=MlpRule(activation=config.activation("silu", "hidden_act")),
    )
