"""OPT."""

from __future__ import annotations

from trainledger.errors import Refused
from trainledger.facts.model import Model
from trainledger.facts.semantics import BlockRule, EntryRule, ExitRule, MlpRule, NormRule, Semantics
from trainledger.runtime.model.config import Config
from trainledger.runtime.model.families.common import attentions


def read(model: Model, config: Config) -> Semantics:
    """Learned positions from row 2; a network's matrices lie in the block itself; OPT-350M normalises after adding."""
    config.ignore("scale_embedding", "output_projection")
    if config.number("layerdrop", 0.0):
        raise Refused("runtime-config", f"{model.name}: layerdrop skips layers at random; --set layerdrop=0")
    before = config.flag("do_layer_norm_before", default=True)
    last_norm = before and not config.flag("_remove_final_layer_norm")
    narrow = any(fact.name.startswith("model.decoder.project_in") for fact in model.embedding)
    return Semantics(
        norm=NormRule(kind="layer", eps=1e-5),  # nn.LayerNorm's own epsilon
        attention=attentions(model, out="out_proj", rotary=None),
        block=BlockRule(
            residual="chain" if before else "after",
            before_attention="self_attn_layer_norm",
            before_network="final_layer_norm",
        ),
        mlp=MlpRule(
            path="", kind="plain", activation=config.activation("relu", "activation_function"), up="fc1", down="fc2"
        ),
        entry=EntryRule(
            tokens="model.decoder.embed_tokens",
            positions="model.decoder.embed_positions",
            first_row=2,
            project="model.decoder.project_in" if narrow else "",
        ),
        exit=ExitRule(
            norm="model.decoder.final_layer_norm" if last_norm else "",
            project="model.decoder.project_out" if narrow else "",
        ),
    )
