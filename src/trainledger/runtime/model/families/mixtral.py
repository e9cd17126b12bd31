"""Mixtral."""

from __future__ import annotations

import msgspec

from trainledger.facts.model import Model
from trainledger.facts.semantics import MoeRule, Semantics
from trainledger.runtime.model.config import Config
from trainledger.runtime.model.families.common import llama_like


def read(model: Model, config: Config) -> Semantics:
    """Llama's block with routed experts: the weights of a token sum to one."""
    plain = llama_like(model, config, theta=1e6, eps=1e-5)
    facts = model.blocks[0].moe
    if facts is None:
        raise AssertionError("every layer of a Mixtral is routed")
    config.ignore("norm_topk_prob")  # MixtralTopKRouter always divides by the sum
    moe = MoeRule(
        path="block_sparse_moe",
        top_k=facts.top_k,
        renormalise=True,
        activation=plain.mlp.activation,
        names=("w1", "w3", "w2"),
    )
    return msgspec.structs.replace(plain, moe=moe)
