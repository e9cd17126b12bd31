"""The tapes of a model's parts, each walked once for all layers that are alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from trainledger.facts.model import Block
from trainledger.facts.semantics import AttentionRule, Semantics
from trainledger.inventory.blocks.eager.block import Built
from trainledger.inventory.blocks.eager.ends import Ends
from trainledger.inventory.blocks.eager.fp8 import emulated
from trainledger.inventory.blocks.eager.ops import Ops, Sheet
from trainledger.inventory.blocks.frozen import frozen_of
from trainledger.inventory.blocks.sizes import Sizes
from trainledger.inventory.tape import Program, Value
from trainledger.plans.plan import Plans

Walked = TypeVar("Walked")


def unlike(plans: Plans) -> NDArray[np.bool_]:
    """[plans, 5]: what plans must agree in to have the same operations: each kind of parallelism in use or not."""
    return np.stack([plans.tp > 1, plans.sp_ranks > 1, plans.pp > 1, plans.ep > 1, plans.cp > 1], axis=1)


class Eager(Generic[Walked]):
    """The parts of a model under a Setting on one rank of each plan.

    rules     of its forward pass
    walk      what becomes of a program whose last tensor is handed on: its tape, most often
    ring_end  the rank is the last of its context-parallel ones (attention.py)
    emulates  products in FP8 are emulated, as on a CPU (fp8.py); else their casts take no room here
    """

    def __init__(
        self,
        sizes: Sizes,
        rules: Semantics,
        walk: Callable[[Program, Value | None], Walked],
        *,
        ring_end: bool = False,
        emulates: bool = False,
    ) -> None:
        self.sizes = sizes
        self.rules = rules
        self.walk = walk
        self.ring_end = ring_end
        self.casts = emulated(sizes.setting) if emulates else None
        self.model = sizes.setting.model
        self._layers: dict[tuple[int, AttentionRule], Walked] = {}

    def _walked(self, build: Callable[[Ops], Sheet | None]) -> Walked:
        ops = Ops(Program(), self.sizes.dtype, frozen_of(self.sizes.setting))
        given = build(ops)
        return self.walk(ops.program, None if given is None else given.value)

    def _ends(self, ops: Ops) -> Ends:
        return Ends(ops, self.model, self.rules, self.sizes)

    def _hidden(self, ops: Ops) -> Sheet:
        rows = self.sizes.tokens // self.sizes.sp_ranks
        return ops.input("hidden states", rows, self.model.hidden_size, self.sizes.setting.stream)

    def embedding(self) -> Walked:
        """What comes before the first layer."""
        return self._walked(lambda ops: self._ends(ops).entry())

    def layer(self, block: Block, index: int) -> Walked:
        """Layer `index`, which is of this kind."""
        rule = self.rules.attention[index]
        key = (block.layers[0], rule)
        if key not in self._layers:
            self._layers[key] = self._walked(lambda ops: self._layer(ops, block, index))
        return self._layers[key]

    def _layer(self, ops: Ops, block: Block, index: int) -> Sheet:
        built = Built(ops, block, self.rules, self.rules.attention[index], self.sizes, ring_end=self.ring_end)
        ops.casts = self.casts
        hidden = self._hidden(ops)
        if self.sizes.setting.scenario.recompute != "full":
            return built.forward(hidden)
        early = not self.sizes.setting.profile.traffic.recompute_reruns_last
        with ops.program.recomputed(early_stop=early, asked=True):
            return built.forward(hidden)

    def output(self) -> Walked:
        """Norm and output layer."""
        return self._walked(lambda ops: self._ends(ops).exit(self._hidden(ops)))

    def loss(self) -> Walked:
        """From logits to the loss."""
        return self._walked(self._loss)

    def _loss(self, ops: Ops) -> None:
        ends = self._ends(ops)
        ends.loss(ops.input("logits", *ends.logits))

    def final(self) -> Walked:
        """All that follows the last layer as one part; a pipeline holds the logits until their backward is over."""
        return self._walked(self._final)

    def _final(self, ops: Ops) -> None:
        ends = self._ends(ops)
        logits = ends.exit(self._hidden(ops))
        ends.loss(logits)
        if np.any(self.sizes.plans.pp > 1):
            ops.program.hold(logits.value, through_backward=True)
