"""FSDP of flat parameters in a run: when each is gathered, dropped and reduced, and on which stream it lies.

What is dropped was used on another stream than it was made on, so its memory is free once the card is done with it. The
program waits for the drop before the last one before it gathers again (limit_all_gathers), so two are never free; a
flat gradient is taken to be read by its reduction until the next one begins.
[torch: distributed/fsdp/_runtime_utils.py, _flat_param.py, _limiter_utils.py]
"""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.account.memory.engines.fsdp1 import Fsdp1
from trainledger.account.memory.reserved.engines.fsdp2 import Fsdp2Run, Unit
from trainledger.account.memory.reserved.engines.fsdp2_units import size_of
from trainledger.account.memory.reserved.run import ALL_GATHER, BEFORE_GATHER, COMPUTE, REDUCE, Layer, Requests

IN_FLIGHT = 2
"""Units that are gathered while memory of earlier ones is not known to be free."""


def flat_units_of(passing: Fsdp1, layers: Sequence[Layer]) -> dict[int, tuple[Unit, ...]]:
    """Key of each layer of a single plan -> its flat parameter; both ends name the root."""
    at, setting = passing.own.table.at, passing.inventory.setting
    kept = not passing.drops[0, 0]

    def unit(slot: int, *, root: bool) -> Unit:
        whole, over = int(passing.whole[0, slot]), int(passing.own.dense[0])
        given = int(passing.given[0, slot])
        casts = setting.dtype("reduce") != setting.dtype("weight")
        shard = size_of(int(passing.flat[0, slot]) // over, setting.dtype("weight"))
        return Unit(
            weights=(whole,),
            flat=int(passing.summed[0, slot]),
            cast=whole // over if setting.casts or passing.away else 0,
            away=passing.away,
            alone=False,
            widens=1,
            reduced=int(passing.reduced[0, slot]),
            shard=given - shard if casts else given,
            cast_shard=shard if casts else 0,
            kept=kept or root,
            at_end=root,
            tied=root and setting.model.tied,
        )

    root, blocks = unit(at.embedding, root=True), dict[int, Unit]()
    of: dict[int, tuple[Unit, ...]] = {}
    for layer in layers:
        slot = layer.slots[0] if layer.slots else at.final
        if slot in (at.embedding, at.final):
            of[layer.key] = (root,)
        else:
            # units are told apart by what they are, so each block has its own
            of[layer.key] = (blocks.setdefault(layer.key, unit(slot, root=False)),)
    return of


class Fsdp1Run(Fsdp2Run):
    """Flat parameters of a model.

    no_sync     gradients of micro-batches add up whole until the last one
    inputs_stay what a block was given and its gradient stay until the backward is over (account/memory/layers.py)
    asks_early  a block asks for the one that ran before it as its backward begins; else an adapter inside does, as late
                as that runs backward
    """

    def __init__(
        self,
        requests: Requests,
        of: dict[int, tuple[Unit, ...]],
        *,
        no_sync: bool,
        asks_early: bool,
        inputs_stay: bool,
    ) -> None:
        super().__init__(requests, of, accumulate=False)
        self.no_sync = no_sync
        self.asks_early = asks_early
        self.inputs_stay = inputs_stay
        self.hooked: list[int] = []
        self.dropped: list[list[int]] = []
        self.going: list[int] = []

    def before_forward(self, layer: Layer) -> None:
        """Gather its unit unless it is there."""
        for unit in self.of.get(layer.key, ()):
            self._there(unit)

    def before_backward(self, layer: Layer) -> None:
        """The same, and ask for the one that ran before."""
        for unit in self.of.get(layer.key, ()):
            self._there(unit)
            if self.asks_early or unit.at_end:
                self._ask_before(unit)

    def after_backward(self, layer: Layer, gradients: list[int], *, last: bool) -> None:
        """A block's gradients are all there; the root's wait for the end."""
        sizes = [nbytes for _, nbytes in layer.script.gradients]
        for unit in self.of.get(layer.key, ()):
            if unit.tied and unit in self.fresh:
                self.requests.free(gradients)
            else:
                self.fresh.setdefault(unit, []).extend(zip(gradients, sizes, strict=True))
            self._ask_before(unit)
            if not unit.at_end:
                self._hand_over(unit, last=last)
                # in place of the input, which a run lets go of
                self.hooked += self.requests.alloc([layer.script.input_bytes] * (2 * self.inputs_stay))

    def end_of_backward(self, layers: Sequence[Layer], *, last: bool) -> None:
        """The root."""
        for unit in dict.fromkeys(unit for layer in layers for unit in self.of.get(layer.key, ())):
            if unit in self.fresh:
                self._hand_over(unit, last=last)
        self.requests.free(self.hooked)
        self.hooked, self.order = [], []

    def end_of_step(self) -> None:
        """Gradients are dropped, and all that was in flight has landed."""
        super().end_of_step()
        for names in (*self.dropped, self.going):
            self.requests.free(names)
        self.dropped, self.going = [], []

    def _there(self, unit: Unit) -> None:
        if unit not in self.gathered:
            if unit not in self.coming:
                self._ask(unit)
            self.gathered[unit] = self.coming.pop(unit)

    def _ask(self, unit: Unit) -> None:
        """A shard in the dtype that travels, then the flat parameter that all shards make."""
        cast = self.requests.alloc([unit.cast], BEFORE_GATHER)
        while len(self.dropped) >= IN_FLIGHT:
            self.requests.free(self.dropped.pop(0))
        self.coming[unit] = self.requests.alloc(unit.weights, ALL_GATHER)
        self.requests.free(cast)

    def _reshard(self, unit: Unit) -> None:
        if unit in self.gathered:
            self.dropped.append(self.gathered.pop(unit))

    def _hand_over(self, unit: Unit, *, last: bool) -> None:
        """Put gradients side by side, and reduce them or let them wait."""
        fresh = [name for name, _ in self.fresh.pop(unit)]
        flat = self.requests.alloc([unit.flat], COMPUTE)
        self.requests.free(fresh)
        if unit in self.summed:
            self.requests.free(flat)
            flat = self.summed.pop(unit)
        if last or not self.no_sync or not unit.kept or unit.at_end:
            self._reshard(unit)
        if self.no_sync and not last:
            self.summed[unit] = flat
        else:
            self._reduce(unit, flat)

    def _reduce(self, unit: Unit, gradients: Sequence[int]) -> None:
        self.requests.free(self.going)
        cast = self.requests.alloc([unit.reduced], REDUCE)
        shard = self.requests.alloc([unit.shard], REDUCE)
        if unit.cast_shard:
            given, shard = shard, self.requests.alloc([unit.cast_shard], REDUCE)
            self.requests.free(given)
        self.requests.free(cast)
        self.going = list(gradients)
        if unit in self.shards or unit.away:
            self.requests.free(shard)
        else:
            self.shards[unit] = shard
