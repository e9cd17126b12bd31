"""FSDP2 by the knobs of ZeRO stages in a run: what stays gathered, and when gradients that add up are reduced."""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.account.memory.reserved.engines.fsdp2 import Fsdp2Run, Unit
from trainledger.account.memory.reserved.run import Layer, Requests


class KnobsRun(Fsdp2Run):
    """Units of one stage.

    stays   they stay gathered from the first forward of a step to its end
    piped   a pipeline reduces all of them after its last backward; else each is, as it runs backward for the last time
    """

    holds = 1

    def __init__(
        self, requests: Requests, of: dict[int, tuple[Unit, ...]], *, accumulate: bool, stays: bool, piped: bool
    ) -> None:
        super().__init__(requests, of, accumulate=accumulate)
        self.stays = stays
        self.piped = piped
        self.last = False

    def before_forward(self, layer: Layer) -> None:
        """Gather its units; that of the output layer goes before the loss is computed, which is when most is there."""
        super().before_forward(layer)
        if layer.script.output < 0 and not self.accumulate:
            for unit in self.of.get(layer.key, ()):
                self._reshard(unit)

    def before_backward(self, layer: Layer) -> None:
        """Gather its units; that of the output layer once the loss has run backward, which is when most is over."""
        if layer.script.output >= 0:
            super().before_backward(layer)

    def after_backward(self, layer: Layer, gradients: list[int], *, last: bool) -> None:
        """Reduce, or add up until the last micro-batch."""
        self.last = last
        if layer.script.output < 0:
            super().before_backward(layer)
        super().after_backward(layer, gradients, last=last)

    def end_of_backward(self, layers: Sequence[Layer], *, last: bool) -> None:
        """The units whose gradients waited."""
        self.last = last
        super().end_of_backward(layers, last=last)

    def end_of_step(self) -> None:
        """Gradients are dropped, and what stayed gathered is."""
        super().end_of_step()
        for unit in list(self.gathered):
            super()._reshard(unit)

    def _reshard(self, unit: Unit) -> None:
        if not self.stays:
            super()._reshard(unit)

    def _over(self, unit: Unit) -> None:
        if self.piped or not self.accumulate or not self.last:
            super()._over(unit)
            return
        fresh = [name for name, _ in self.fresh.pop(unit)]
        if unit in self.summed:
            self.requests.free(fresh)
            fresh = self.summed.pop(unit)
        self._reshard(unit)
        self._reduce(unit, fresh)
