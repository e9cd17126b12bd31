"""DeepSpeed's optimizers of 2022 in a run: what they pass through the card when the last backward is over."""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.account.memory.engines.flat_groups import FlatGroups
from trainledger.account.memory.reserved.run import Engine, Layer, Requests


class FlatRun(Engine):
    """One request after the other."""

    def __init__(self, requests: Requests, passing: FlatGroups, row: int) -> None:
        super().__init__(requests)
        self.together = [tuple(int(amount[0, row]) for amount in together) for together in passing.requests]
        self.gathered = int(passing.gathered[0, row])
        self.first = int(passing.first[0, row])
        self.tensors = passing.tensors(row)

    def start(self) -> None:
        """Parameters that the flat tensor has replaced are gone, and a step with zeros has made the moments."""
        self.requests.free(self.requests.alloc(self.tensors))
        self.requests.free(self.requests.alloc([self.first]))

    def end_of_backward(self, layers: Sequence[Layer], *, last: bool) -> None:
        """The last one lets gradients be reduced and measured."""
        del layers
        for together in self.together if last else ():
            self.requests.free(self.requests.alloc(together))

    def end_of_step(self) -> None:
        """Weights are gathered."""
        self.requests.free(self.requests.alloc([self.gathered]))
