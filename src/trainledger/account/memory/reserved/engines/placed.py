"""What passes at the places of a step, asked for in a run place by place.

This serves every Passing whose own order of requests nobody wrote down: at each place one storage of what passes there
beyond what always does.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.account.memory.engines.passing import Part, Passing
from trainledger.account.memory.reserved.run import Engine, Layer, Requests


class Placed(Engine):
    """One storage for the whole run, and one at each place that has more."""

    def __init__(self, requests: Requests, passing: Passing, row: int, layers: Sequence[Layer]) -> None:
        super().__init__(requests)
        self.passing = passing
        self.row = row
        self.always = self._bytes("none", -1, first=False)
        self.highest = {layer.slots[0]: layer.key for layer in layers if layer.slots}
        self.known: dict[tuple[Part, int, bool], int] = {}
        self.here: list[int] = []

    def _bytes(self, part: Part, slot: int, *, first: bool) -> int:
        return int(self.passing.at(part, slot, first)[0, self.row])

    def _more(self, part: Part, layer: Layer) -> int:
        if not layer.slots:
            return 0
        # the first that runs backward is the last of its slot in the order of the stage
        slot = layer.slots[0]
        where = (part, slot, self.highest[slot] == layer.key)
        if where not in self.known:
            self.known[where] = max(self._bytes(part, slot, first=where[2]) - self.always, 0)
        return self.known[where]

    def start(self) -> None:
        """What is there for the whole run."""
        self.requests.alloc([self.always])

    def before_forward(self, layer: Layer) -> None:
        """What passes while it runs forward."""
        self.here = self.requests.alloc([self._more("forward", layer)])

    def after_forward(self, layer: Layer) -> None:
        """It is gone."""
        del layer
        self.requests.free(self.here)

    def before_backward(self, layer: Layer) -> None:
        """What passes while it runs backward."""
        self.here = self.requests.alloc([self._more("backward", layer)])

    def after_backward(self, layer: Layer, gradients: list[int], *, last: bool) -> None:
        """It is gone, and something passes as the gradients are handed over."""
        del last
        self.requests.free(self.here)
        self.requests.free(gradients)
        self.requests.free(self.requests.alloc([self._more("handed", layer)]))
