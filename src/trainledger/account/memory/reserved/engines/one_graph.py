"""Units of a step that is one graph: gathered and reduced by operations of the graph, on the stream that computes.

A block's shards are copied into their places in one buffer, which is gathered in place; that of the unit that runs next
is asked for before this one is copied out. Gradients are in the dtype of reductions as they come; when a unit's are all
there they are put into one buffer, which lies there until the next unit's reduction has begun.
[torch: _inductor/fx_passes/bucketing.py, overlap_manual_scheduling.py]
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from trainledger.account.memory.reserved.engines.fsdp2 import Fsdp2Run, Unit
from trainledger.account.memory.reserved.run import Layer, Requests


class OneGraphRun(Fsdp2Run):
    """Units of one stage, which is all of the model."""

    def __init__(self, requests: Requests, of: dict[int, tuple[Unit, ...]]) -> None:
        super().__init__(requests, of, accumulate=False)
        places = [(key, unit) for key, units in of.items() for unit in units]
        self.following = {before: unit for before, (_, unit) in pairwise(places)}

    def before_forward(self, layer: Layer) -> None:
        """Copy its units out of their buffers, each with the next one's there."""
        for unit in self.of.get(layer.key, ()):
            self._ask_for(unit)
            if (layer.key, unit) in self.following:
                self._ask_for(self.following[layer.key, unit])
            if unit not in self.gathered:
                self.requests.free(self._copy_out(unit))

    def _ask_for(self, unit: Unit) -> None:
        if unit not in self.gathered and unit not in self.coming:
            self._ask(unit)

    def _ask(self, unit: Unit) -> None:
        """One buffer, of which this rank's part is its shard in the dtype that travels."""
        self.coming[unit] = [] if unit.alone else self.requests.alloc([sum(unit.weights)])

    def _reduce(self, unit: Unit, gradients: Sequence[int]) -> None:
        buffer = self.requests.alloc([unit.reduced])
        self.requests.free(gradients)
        shard = self.requests.alloc([unit.shard])
        self.requests.free(self.reducing)
        self.reducing = buffer
        if unit in self.shards:
            self.requests.free(shard)
        else:
            self.shards[unit] = shard
