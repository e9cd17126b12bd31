"""One decoder layer: norms, attention, network and residual adds, in the order that a BlockRule says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from trainledger.facts.model import Block as Facts
from trainledger.facts.semantics import MlpRule, MoeRule, Semantics
from trainledger.runtime.model.attention import Attention
from trainledger.runtime.model.context import Context
from trainledger.runtime.model.latent import make_attention
from trainledger.runtime.model.mlp import Mlp, network
from trainledger.runtime.model.moe import Experts, Moe
from trainledger.runtime.model.norms import Norm
from trainledger.runtime.model.tree import graft, leaves


class Block(nn.Module):
    """Layer `layer` of the model.

    forward(hidden [B, S, H], context) -> [B, S, H]; it keeps no state, so it may be recomputed.
    """

    def __init__(self, layer: int, facts: Facts, semantics: Semantics) -> None:
        super().__init__()
        self.layer = layer
        self.rule = semantics.block
        self.attention_path = semantics.attention[layer].path
        self.network_rule: MlpRule | MoeRule = semantics.mlp
        containers: dict[str, nn.Module] = {self.attention_path: make_attention(semantics.attention[layer])}
        if facts.moe is not None and semantics.moe is not None:
            self.network_rule = semantics.moe
            containers.update(_routed(semantics.moe))
        elif semantics.mlp.path:
            containers[semantics.mlp.path] = Mlp(semantics.mlp)
        graft(self, leaves(facts.tensors, semantics), containers)
        for name in self._norm_names():
            if name not in self._modules:
                self.add_module(name, Norm(semantics.norm, None))  # a norm without parameters (OLMo)

    @property
    def attention(self) -> Attention:
        """The attention module, under whatever name the family gives it."""
        found = self._modules.get(self.attention_path)
        if found is None:
            raise AttributeError(self.attention_path)  # not grafted yet, and nn.Module asks whether the name is free
        return cast("Attention", found)

    def _norm_names(self) -> Sequence[str]:
        rule = self.rule
        names = (rule.before_attention, rule.after_attention, rule.before_network, rule.after_network)
        return [name for name in names if name]

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        """[B, S, H] to [B, S, H]."""
        rule = self.rule
        if rule.residual == "after":
            hidden = self._norm(rule.before_attention, hidden + self._attend(hidden, context))
            return self._norm(rule.before_network, hidden + self._network(hidden))
        normed = self._norm(rule.before_attention, hidden)
        mixed = self._norm(rule.after_attention, self._attend(normed, context))
        if rule.residual == "parallel":
            same = rule.before_network == rule.before_attention
            other = normed if same else self._norm(rule.before_network, hidden)
            return self._add(hidden, mixed + self._network(other))
        hidden = self._add(normed if rule.from_normed else hidden, mixed)
        normed = self._norm(rule.before_network, hidden)
        given = self._norm(rule.after_network, self._network(normed))
        return self._add(normed if rule.from_normed else hidden, given)

    def _add(self, hidden: Tensor, more: Tensor) -> Tensor:
        return hidden + (more if self.rule.multiplier == 1.0 else more * self.rule.multiplier)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return self.get_submodule(name)(x) if name else x

    def _attend(self, x: Tensor, context: Context) -> Tensor:
        return self.get_submodule(self.attention_path)(x, context)

    def _network(self, x: Tensor) -> Tensor:
        rule = self.network_rule
        if isinstance(rule, MlpRule) and not rule.path:
            return network(self, rule, x)
        return self.get_submodule(rule.path)(x)


def _routed(rule: MoeRule) -> dict[str, nn.Module]:
    """The modules of a routed network by path."""
    made: dict[str, nn.Module] = {rule.path: Moe(rule), f"{rule.path}.experts": Experts(rule)}
    if rule.shared is not None:
        made[f"{rule.path}.{rule.shared.path}"] = Mlp(rule.shared)
    return made
