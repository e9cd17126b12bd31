"""Feed-forward networks and their activations, in the order in which the program runs them."""

from __future__ import annotations

from trainledger.facts.semantics import MlpRule
from trainledger.inventory.blocks.eager.ops import Count, Ops, Sheet


def activated(ops: Ops, name: str, x: Sheet, activation: str) -> Sheet:
    """The activation of a config's name: what keeps its input, what its output, and what is several operations."""
    match activation:
        case "relu":
            return ops.from_output(name, x)
        case "relu2":
            return ops.square(f"{name}: square", ops.from_output(name, x))
        case "quick_gelu":
            return ops.mul(name, x, ops.from_output(f"{name}: sigmoid", ops.scale(f"{name}: slope", x)))
        case _:
            return ops.from_input(name, x)


def network(ops: Ops, rule: MlpRule, x: Sheet, inner: Count, width: Count, *, biases: frozenset[str]) -> Sheet:
    """X [tokens, hidden] through matrices of `inner` features on this rank, to [tokens, width].

    biases   which of rule.gate, rule.up and rule.down have one
    """
    fused = rule.kind == "fused"
    up = ops.linear("up projection", x, inner * 2 if fused else inner, bias=rule.up in biases, module=rule.up)
    if rule.kind == "gated":
        gate = ops.linear("gate projection", x, inner, bias=rule.gate in biases, module=rule.gate)
        made = ops.mul("gated", activated(ops, "activation", gate, rule.activation), up)
    elif fused:
        gate, up = ops.chunks("gate and up", up, {"gate": inner, "up": inner})
        made = ops.mul("gated", activated(ops, "activation", gate, rule.activation), up)
    else:
        made = activated(ops, "activation", up, rule.activation)
    return ops.linear("down projection", made, width, bias=rule.down in biases, module=rule.down)
