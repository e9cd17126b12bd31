"""FSDP2 in a run: when each unit is gathered, resharded and reduced, and on which stream its storages lie.

In forward the buffer that a unit was gathered into is held until the next one's has been copied out; in backward the
unit before is gathered as soon as this one is there. After a unit's backward its weights go, then what the reduction
before took, and a buffer for all its gradients is made beside them. What a reduction gives is the sharded gradient
itself, on the stream of reductions; the optimizer reads it there.
[torch: distributed/fsdp/_fully_shard/_fsdp_param_group.py, _fsdp_collectives.py, _fsdp_state.py]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from trainledger.account.memory.reserved.run import ALL_GATHER, COMPUTE, REDUCE, Engine, Layer, Requests


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Unit:
    """What is gathered and reduced at once; bytes.

    weights    of each tensor as it is gathered
    cast       of this rank's shard in the dtype that travels; 0: it is in that dtype
    alone      one rank has the whole: nothing travels, and what is computed with is a copy
    widens     a gradient in the dtype of reductions takes so many times what the backward gives
    reduced    what a reduction takes: all of them, padded
    shard      what it gives; cast_shard: the same in the dtype of kept gradients, where that is another, else 0
    kept       it stays gathered between forward and backward
    tied       two layers that are in it share a table: the second gradient is added into the first
    flat       the one tensor that its gradients are put into; 0: they stay apart
    away       what it gives is copied to the host, and let go of on the card
    at_end     nothing that enters it needs a gradient, so that its gradients wait for the end of the whole backward
    """

    weights: tuple[int, ...]
    cast: int
    alone: bool
    widens: int
    reduced: int
    shard: int
    cast_shard: int = 0
    kept: bool = False
    tied: bool = False
    at_end: bool = False
    flat: int = 0
    away: bool = False


class Fsdp2Run(Engine):
    """Units of one stage.

    of          key of a layer -> its units, in the order in which they are gathered
    accumulate  gradients are added up unsharded until the last micro-batch, and weights stay gathered until then, as
                under a pipeline
    holds       how many gradients of a unit, of those that came first, are held until its shard is made
    """

    holds = 0

    def __init__(self, requests: Requests, of: dict[int, tuple[Unit, ...]], *, accumulate: bool) -> None:
        super().__init__(requests)
        self.of = of
        self.accumulate = accumulate
        self.gathered: dict[Unit, list[int]] = {}
        self.coming: dict[Unit, list[int]] = {}
        self.held: list[int] = []
        self.reducing: list[int] = []
        self.fresh: dict[Unit, list[tuple[int, int]]] = {}
        self.summed: dict[Unit, list[int]] = {}
        self.shards: dict[Unit, list[int]] = {}
        self.order: list[Unit] = []

    def before_forward(self, layer: Layer) -> None:
        """Gather its units, and let go of the buffer of the one before; after the last one of both, before the loss."""
        for unit in self.of.get(layer.key, ()):
            if unit not in self.gathered:
                self._ask(unit)
                buffer = self._copy_out(unit)
                self.requests.free(self.held)
                self.held = buffer
        if layer.script.output < 0:
            self.end_of_forward()

    def after_forward(self, layer: Layer) -> None:
        """Reshard what is not kept."""
        for unit in self.of.get(layer.key, ()):
            if unit in self.order:
                self.order.remove(unit)
            self.order.append(unit)
            if not (unit.kept or self.accumulate):
                self._reshard(unit)

    def end_of_forward(self) -> None:
        """Nothing is gathered next."""
        self.requests.free(self.held)
        self.held = []

    def before_backward(self, layer: Layer) -> None:
        """Gather its units unless they are there, and ask for the one that ran before.

        Where the layer ends in the loss, that is asked for when the logits have their gradient: after most is over.
        """
        for unit in reversed(self.of.get(layer.key, ())):
            if unit not in self.gathered:
                if unit not in self.coming:
                    self._ask(unit)
                self.requests.free(self._copy_out(unit))
            if layer.script.output >= 0:
                self._ask_before(unit)

    def after_backward(self, layer: Layer, gradients: list[int], *, last: bool) -> None:
        """Reduce, or add up until the last micro-batch."""
        del last
        units = self.of.get(layer.key, ())
        if not units:
            self.requests.free(gradients)
        for unit in units:
            # the first is handed over last: until then all gradients of the layer are taken to be there
            sizes = (nbytes for _, nbytes in layer.script.gradients)
            mine = list(zip(gradients, sizes, strict=True)) if unit is units[0] else []
            if unit.tied and unit in self.fresh:
                self.requests.free(gradients)
            else:
                self.fresh.setdefault(unit, []).extend(mine)
        for unit in reversed(units):
            self._ask_before(unit)
            if not unit.at_end:
                self._over(unit)

    def end_of_backward(self, layers: Sequence[Layer], *, last: bool) -> None:
        """The units whose gradients waited; under accumulation, after the last micro-batch, all of them."""
        units = list(dict.fromkeys(unit for layer in layers for unit in self.of.get(layer.key, ())))
        for unit in units:
            if unit in self.fresh:
                self._over(unit)
        for unit in units:
            if last and unit in self.summed:
                self._reshard(unit)
                self._reduce(unit, self.summed.pop(unit))
        self.requests.free(self.reducing)
        self.reducing = []
        self.order = []

    def end_of_step(self) -> None:
        """The gradients are dropped."""
        for shard in self.shards.values():
            self.requests.free(shard)
        self.shards = {}

    def _ask(self, unit: Unit) -> None:
        """Gather: this rank's shard in the dtype that travels, and a buffer for all shards."""
        if unit.alone:
            self.coming[unit] = []
            return
        cast = self.requests.alloc([unit.cast], ALL_GATHER)
        self.coming[unit] = self.requests.alloc([sum(unit.weights)], ALL_GATHER)
        self.requests.free(cast)

    def _ask_before(self, unit: Unit) -> None:
        """Gather the unit that ran forward before this one, once."""
        if unit not in self.order:
            return
        where = self.order.index(unit)
        del self.order[where]
        if where:
            before = self.order[where - 1]
            if before not in self.gathered and before not in self.coming:
                self._ask(before)

    def _copy_out(self, unit: Unit) -> list[int]:
        """The tensors that are computed with; what they were copied from."""
        self.gathered[unit] = self.requests.alloc(unit.weights, COMPUTE)
        return self.coming.pop(unit)

    def _reshard(self, unit: Unit) -> None:
        self.requests.free(self.gathered.pop(unit, []))

    def _over(self, unit: Unit) -> None:
        """A unit's backward is over, and its gradients are there."""
        fresh = self.fresh.pop(unit)
        if not self.accumulate:
            self._reshard(unit)
            self._reduce(unit, [name for name, _ in fresh])
        elif unit in self.summed:
            self.requests.free(name for name, _ in fresh)
        else:
            self.summed[unit] = [self._widened(unit, name, nbytes) for name, nbytes in fresh]

    def _widened(self, unit: Unit, name: int, nbytes: int) -> int:
        """The gradient that further micro-batches are added to."""
        if unit.widens == 1:
            return name
        summed = self.requests.alloc([nbytes * unit.widens])[0]
        self.requests.free([name])
        return summed

    def _reduce(self, unit: Unit, gradients: Sequence[int]) -> None:
        self.requests.free(self.reducing)
        self.reducing = self.requests.alloc([unit.reduced])
        self.requests.free(gradients[self.holds :])
        shard = self.requests.alloc([unit.shard], REDUCE)
        if unit.cast_shard:
            cast = self.requests.alloc([unit.cast_shard], REDUCE)
            self.requests.free(shard)
            shard = cast
        self.requests.free(gradients[: self.holds])
        if unit in self.shards or unit.away:
            self.requests.free(shard)
        else:
            self.shards[unit] = shard
