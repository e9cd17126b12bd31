"""StarCoder2."""

from __future__ import annotations

from trainledger.facts.model import Model
from trainledger.facts.semantics import MlpRule, Semantics
from trainledger.runtime.model.config import Config
from trainledger.runtime.model.families.common import attentions, each_layer, layer_norm, rope_values, rotary


def read(model: Model, config: Config) -> Semantics:
    """LayerNorms with biases and a network without a gate."""
    config.ignore("mlp_type", "norm_type")  # the ledger lets only one value of each pass
    return Semantics(
        norm=layer_norm(config, "norm_epsilon"),
        attention=attentions(model),
        rotary={"rotary": rotary(config, rope_values(config), each_layer(model)[0].qk_head_dim, model)},
        mlp=MlpRule(
            kind="plain", activation=config.activation("gelu_pytorch_tanh", "hidden_act"), up="c_fc", down="c_proj"
        ),
    )
