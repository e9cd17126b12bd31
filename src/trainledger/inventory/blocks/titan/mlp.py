"""The gated feed-forward network: w1 through SiLU, times w3, then w2."""

from __future__ import annotations

from trainledger.arrays import IntArray
from trainledger.inventory.blocks.titan.builder import Builder
from trainledger.inventory.tape import Value


def network(build: Builder, x: Value, inner: int, over: IntArray, *, name: str = "") -> Value:
    """From a whole input through `inner` features, cut over `over` ranks, to partial sums of a whole tensor."""
    sizes = build.sizes
    width, weight = sizes.cut(inner, over), build.weight(sizes.hidden_size * inner) // over
    gate = build.matrix(f"{name}gate projection", x, width, weight)
    if build.compiled:
        up = build.matrix(f"{name}up projection", x, width, weight)
        # one kernel writes both gradients, one of them over that of its result
        gated = build.program.op(f"{name}gated", (gate, up), width, keeps=(gate, up), first_over=True)
    else:
        active = build.program.op(f"{name}activation", gate, width, keeps=(gate,))
        up = build.matrix(f"{name}up projection", x, width, weight)
        gated = build.program.op(f"{name}gated", (active, up), width, keeps=(active, up))
    return build.matrix(f"{name}down projection", gated, sizes.hidden, weight)
