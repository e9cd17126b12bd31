"""What the attention of one layer is built from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from trainledger.arrays import IntArray, ceil_div
from trainledger.facts.model import Attention, Tensor
from trainledger.facts.semantics import AttentionRule, Semantics
from trainledger.inventory.blocks.sizes import Sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """What the attention of one layer is built from.

    tensors   of the layer, by name below its prefix, with `*` for an index
    ring_end  this rank is the last of those that keys go round: no part of its result is computed apart
    """

    facts: Attention
    rule: AttentionRule
    rules: Semantics
    tensors: Mapping[str, Tensor]
    sizes: Sizes
    ring_end: bool = False

    def has(self, module: str, what: str = "bias") -> bool:
        """Whether a module of the attention has a tensor of this name."""
        return f"{self.rule.path}.{module}.{what}" in self.tensors

    def each(self, module: str) -> bool:
        """Whether a norm has a weight of its own for each head."""
        weight = self.tensors.get(f"{self.rule.path}.{module}.weight")
        return weight is not None and (weight.copies > 1 or len(weight.shape) > 1)

    @property
    def in_order(self) -> bool:
        """Whether heads lie one after the other in what attention gives, and not side by side in each token.

        So they do where q was put together, or scores are multiplied plainly: the kernel keeps the order of q.
        """
        rule = self.rule
        if rule.softcap is not None or rule.sinks or rule.alibi or rule.kind == "mla" or self.plainly:
            return True
        if self.sizes.rings and not self.ring_end and not self.exchanges:
            return True
        turned = self.rules.rotary[rule.rotary].dim if rule.rotary is not None else rule.head_dim
        return turned < rule.head_dim or (rule.qk_norm == "after_rotary" and rule.rotary is not None)

    @property
    def exchanges(self) -> bool:
        """Whether ranks of cp exchange heads for tokens, after which heads lie side by side again."""
        return self.sizes.setting.cp_comm == "all_to_all"

    @property
    def plainly(self) -> bool:
        """Whether the scenario has scores multiplied without a kernel for them."""
        return self.sizes.setting.scenario.attention == "eager"

    @property
    def length(self) -> IntArray:
        """[plans]: tokens of one sequence on this rank."""
        return ceil_div(self.sizes.setting.workload.seq, self.sizes.plans.cp)

    @property
    def tokens(self) -> IntArray:
        """[plans]: that this rank computes on."""
        return self.sizes.tokens

    @property
    def heads(self) -> IntArray:
        """[plans]: query heads of this rank."""
        return self.sizes.heads(self.facts)

    @property
    def kv_heads(self) -> IntArray:
        """[plans]: key heads of this rank."""
        return self.sizes.kv_heads(self.facts)
