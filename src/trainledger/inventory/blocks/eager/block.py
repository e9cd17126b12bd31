"""One layer: norms, attention, network and sums, in the order that a BlockRule says."""

from __future__ import annotations

from collections.abc import Mapping

from trainledger.facts.model import Block, Tensor
from trainledger.facts.semantics import AttentionRule, MlpRule, Semantics
from trainledger.inventory.blocks.eager.attention import attention
from trainledger.inventory.blocks.eager.exchange import Exchange
from trainledger.inventory.blocks.eager.layer import Layer
from trainledger.inventory.blocks.eager.moe import Routed
from trainledger.inventory.blocks.eager.network import network
from trainledger.inventory.blocks.eager.norm import norm
from trainledger.inventory.blocks.eager.ops import Ops, Sheet
from trainledger.inventory.blocks.sizes import Sizes


class Built:
    """Writes a layer of one kind down."""

    def __init__(
        self, ops: Ops, block: Block, rules: Semantics, rule: AttentionRule, sizes: Sizes, *, ring_end: bool
    ) -> None:
        self.ops = ops
        self.block = block
        self.rules = rules
        self.attention_rule = rule
        self.sizes = sizes
        self.ring_end = ring_end
        self.exchange = Exchange(ops, sizes)
        self.tensors: Mapping[str, Tensor] = {t.name.replace("{e}", "*"): t for t in block.tensors}

    def forward(self, hidden: Sheet) -> Sheet:
        """The residual stream through the layer, the program's variables held as long as it holds them."""
        rule, program = self.rules.block, self.ops.program
        if rule.residual == "after":
            hidden = self._norm(rule.before_attention, self._sum("attention added", hidden, self._attend(hidden)))
            return self._norm(rule.before_network, self._sum("network added", hidden, self._network(hidden)))
        normed = self._norm(rule.before_attention, hidden)
        program.hold(normed.value)
        mixed = self._norm(rule.after_attention, self._attend(normed))
        program.hold(mixed.value)
        if rule.residual == "parallel":
            same = rule.before_network == rule.before_attention
            other = normed if same else self._norm(rule.before_network, hidden)
            program.hold(other.value)
            both = self.ops.add("attention and network", mixed, self._network(other))
            return self._add("both added", hidden, both)
        hidden = self._add("attention added", normed if rule.from_normed else hidden, mixed)
        second = self._norm(rule.before_network, hidden)
        program.drop(normed.value)
        program.hold(second.value)
        given = self._norm(rule.after_network, self._network(second))
        return self._add("network added", second if rule.from_normed else hidden, given)

    def _sum(self, name: str, a: Sheet, b: Sheet) -> Sheet:
        return self.ops.add(name, a, b)

    def _add(self, name: str, hidden: Sheet, more: Sheet) -> Sheet:
        if self.rules.block.multiplier != 1.0:
            more = self.ops.scale(f"{name}: factor", more)
        return self._sum(name, hidden, more)

    def _norm(self, name: str, x: Sheet) -> Sheet:
        if not name:
            return x
        weight, bias = f"{name}.weight" in self.tensors, f"{name}.bias" in self.tensors
        return norm(self.ops, name, self.rules.norm, x, weight=weight, bias=bias)

    def _attend(self, x: Sheet) -> Sheet:
        assert self.block.attention is not None, "only layers with attention are run"
        layer = Layer(
            facts=self.block.attention,
            rule=self.attention_rule,
            rules=self.rules,
            tensors=self.tensors,
            sizes=self.sizes,
            ring_end=self.ring_end,
        )
        inside = self.exchange.enter("attention", x)
        return self.exchange.leave("attention", attention(self.ops, layer, inside))

    def _network(self, x: Sheet) -> Sheet:
        inside = self.exchange.enter("network", x)
        if self.block.moe is not None:
            assert self.rules.moe is not None, "routed layers have a rule"
            given = Routed(self.ops, self.block.moe, self.rules.moe, self.tensors, self.sizes).forward(inside)
        else:
            assert self.block.mlp is not None, "every layer has a network"
            given = self._mlp(self.rules.mlp, self.block.mlp.intermediate, inside)
        return self.exchange.leave("network", given)

    def _mlp(self, rule: MlpRule, intermediate: int, x: Sheet) -> Sheet:
        path = f"{rule.path}." if rule.path else ""
        names = (rule.gate, rule.up, rule.down)
        biases = frozenset(name for name in names if f"{path}{name}.bias" in self.tensors)
        inner = -(-intermediate // self.sizes.tp)
        return network(self.ops, rule, x, inner, x.width, biases=biases)
