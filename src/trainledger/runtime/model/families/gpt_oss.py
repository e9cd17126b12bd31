"""gpt-oss."""

from __future__ import annotations

from trainledger.facts.model import Model
from trainledger.facts.semantics import MoeRule, Semantics
from trainledger.runtime.model.config import Config
from trainledger.runtime.model.families.common import attentions, each_layer, rms, rope_values, rotary

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What GptOssConfig takes where the config says nothing of rotary positions."""


def read(model: Model, config: Config) -> Semantics:
    """A sink for each head, YaRN, experts with biases and a clamped gate, weights by a softmax over the chosen ones."""
    config.ignore("initial_context_length", "hidden_act")  # the experts have an activation of their own
    facts = model.blocks[0].moe
    if facts is None:
        raise AssertionError("every layer of a gpt-oss is routed")
    values = rope_values(config, theta=150000.0)
    if not config.entries("rope_parameters") and not config.entries("rope_scaling"):
        values |= _YARN
    return Semantics(
        norm=rms(config, 1e-5),
        attention=attentions(model, sinks=True),
        rotary={"rotary": rotary(config, values, each_layer(model)[0].qk_head_dim, model)},
        moe=MoeRule(
            router="softmax_top",
            gate="router",
            top_k=facts.top_k,
            stacked="interleaved",
            limit=config.number("swiglu_limit", 7.0),
            alpha=config.number("swiglu_alpha", 1.702),
        ),
    )
