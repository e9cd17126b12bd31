"""nanotron in a run: gradients wait for the end of a micro-batch's backward, beside tables that stay."""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.account.memory.reserved.run import Engine, Layer, Requests


class WaitingRun(Engine):
    """Gradients of all layers of a micro-batch, let go of together.

    tables   bytes that are there for the whole run
    tied     the embedding's gradient is added into the output layer's, where both are here
    """

    def __init__(self, requests: Requests, tables: int, *, tied: bool) -> None:
        super().__init__(requests)
        self.tables = tables
        self.tied = tied
        self.waiting: list[int] = []

    def start(self) -> None:
        """The tables."""
        self.requests.alloc([self.tables])

    def after_backward(self, layer: Layer, gradients: list[int], *, last: bool) -> None:
        """They wait, unless there is one for the same tensor already."""
        del last
        if self.tied and self.waiting and layer.script.input < 0:
            self.requests.free(gradients)
        else:
            self.waiting += gradients

    def end_of_backward(self, layers: Sequence[Layer], *, last: bool) -> None:
        """They are added to the buffer that the states count."""
        del layers, last
        self.requests.free(self.waiting)
        self.waiting = []
