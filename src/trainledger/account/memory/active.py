"""Activations at each place of a step: what micro-batches and layers keep, and the walk of the layer that runs.

Layers of a kind are alike, so the walk of one stands for all; only the first and the last that run backward differ, in
what else is there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainledger.account.memory.engines import PASSING
from trainledger.account.memory.engines.passing import Part
from trainledger.account.memory.layers import inputs_stay, on_card, regions
from trainledger.arrays import IntArray, ceil_div
from trainledger.dtypes import bytes_of
from trainledger.facts.model import Model
from trainledger.inventory.blocks import alike, parts_of
from trainledger.inventory.blocks.parts import Parts
from trainledger.inventory.inventory import Inventory
from trainledger.inventory.tape import Tape
from trainledger.inventory.tensors import BoolArray
from trainledger.plans.plan import Plans
from trainledger.profiles.profile import Instant
from trainledger.schedules import Schedule, find_schedule

COLUMNS = ("tp", "sp", "pp", "vpp", "cp", "ep", "etp", "mbs", "num_microbatches")
"""The columns of a plan that activations depend on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """A place of the step.

    label      in words
    states     which instant's states are there
    part       what happens (engines/passing.py)
    slot       the place of inventory/slots.py that runs; -1: none
    first      of the layers of that slot the first that runs backward
    kept       [plans, rows]: activations that wait, this layer's own left out
    walked     [plans, rows]: the layer's own at its highest instant
    here       [plans, rows]: which stages have the place at all
    tape, at   whose highest instant it is, and [plans] which; None where no layer runs
    """

    label: str
    states: Instant
    kept: IntArray
    walked: IntArray
    here: BoolArray
    part: Part = "none"
    slot: int = -1
    first: bool = False
    tape: Tape | None = None
    at: IntArray | None = None

    @cached_property
    def active(self) -> IntArray:
        """[plans, rows]: all activations of the place."""
        return self.kept + self.walked


@dataclasses.dataclass(frozen=True, kw_only=True)
class Active:
    """places: in the order of a step; [plans, rows] each what all micro-batches in flight keep at the turn.

    saved   on the card; host: in host memory
    """

    places: tuple[Place, ...]
    saved: IntArray
    host: IntArray


def active(inventory: Inventory, plans: Plans) -> Active:
    """The places of every distinct stage of each plan."""
    counts, pp_stage = inventory.stage_counts(plans)
    setting = inventory.setting
    if _nothing_known(setting.model) or not setting.profile.activations:
        nothing = np.zeros_like(pp_stage)
        return Active(places=tuple(_idle(nothing)), saved=nothing, host=nothing)
    sorts = alike(inventory, plans)
    if len(sorts) == 1:
        return _Stages(inventory, plans, counts, pp_stage).active()
    return _joined([_Stages(inventory, plans.take(s), counts[s], pp_stage[s]).active() for s in sorts], sorts)


def _nothing_known(model: Model) -> bool:
    return bool(model.unaccounted) or (model.params_only and not model.blocks)


def _joined(parts: Sequence[Active], rows: Sequence[IntArray]) -> Active:
    """Places of plans of several sorts, each of which has tapes of its own: what is alive at an instant is not told."""
    order = np.argsort(np.concatenate(rows))

    def column(name: str, places: Sequence[Place]) -> NDArray[np.int64]:
        return np.concatenate([getattr(place, name) for place in places])[order]

    places = tuple(
        dataclasses.replace(
            same[0],
            kept=column("kept", same),
            walked=column("walked", same),
            here=column("here", same).astype(np.bool_),
            tape=None,
            at=None,
        )
        for same in zip(*(part.places for part in parts), strict=True)
    )
    saved, host = (np.concatenate([getattr(part, name) for part in parts])[order] for name in ("saved", "host"))
    return Active(places=places, saved=saved, host=host)


def received_bytes(inventory: Inventory, plans: Plans, counts: IntArray) -> IntArray:
    """[plans, rows]: what boundary tensors are received into: per micro-batch one for each chunk's input and gradient.

    Held for the whole run, where an engine does so. The first chunk of all receives no input, the last no gradient.
    [torch: distributed/pipelining/stage.py]
    """
    setting, at = inventory.setting, inventory.table.at
    if not setting.profile.traffic.keeps_received:
        return np.zeros(counts.shape[:2], dtype=np.int64)
    ends = (counts[:, :, at.embedding] > 0).astype(np.int64) + (counts[:, :, at.final] > 0)
    boundaries = (2 * plans.vpp[:, None] - ends) * (counts.sum(axis=2) > 0) * (plans.pp > 1)[:, None]
    return boundaries * (plans.num_microbatches * _boundary_bytes(inventory, plans))[:, None]


def _boundary_bytes(inventory: Inventory, plans: Plans) -> IntArray:
    """[plans]: the tensor that one pipeline stage sends to the next."""
    setting = inventory.setting
    hidden = ceil_div(plans.tokens(setting.workload.seq) * setting.model.hidden_size, plans.sp_ranks)
    return bytes_of(hidden, setting.recipe.activation)


def _handed_on(inventory: Inventory, plans: Plans, counts: IntArray) -> IntArray:
    """[plans, rows]: what a micro-batch keeps of boundary tensors beside what layers keep, over all chunks of a stage.

    Where an engine receives into buffers of its own, the first layer of a chunk keeps such a buffer and nothing new;
    and what a chunk sent is held until its backward. So the first chunk of all has one more, the last one less.
    [torch: distributed/pipelining/stage.py fwd_cache]
    """
    setting, at = inventory.setting, inventory.table.at
    if not setting.profile.traffic.keeps_received:
        return np.zeros(counts.shape[:2], dtype=np.int64)
    ends = (counts[:, :, at.embedding] > 0).astype(np.int64) - (counts[:, :, at.final] > 0)
    return ends * ((plans.pp > 1) * _boundary_bytes(inventory, plans))[:, None]


def _idle(kept: IntArray) -> list[Place]:
    """The places where no layer runs, and the turn, which a count of parameters has too."""
    everywhere, nothing = np.ones_like(kept, dtype=np.bool_), np.zeros_like(kept)
    ends: tuple[tuple[str, Instant, Part], ...] = (
        ("between steps", "rest", "none"),
        ("turn from forward to backward", "loss", "none"),
        ("end of backward", "backward", "end"),
        ("optimizer step", "step", "none"),
    )
    return [
        Place(label=label, states=states, part=part, kept=kept, walked=nothing, here=everywhere)
        for label, states, part in ends
    ]


class _Kind(NamedTuple):
    """Layers that run alike.

    layers   [plans, rows]: how many a stage has, or regions of them that its tape is of, on the card
    earlier  [plans, rows]: bytes that others of its slot keep before its first, in its chunk; later: after its last
    """

    name: str
    slot: int
    tape: Tape
    layers: IntArray
    earlier: IntArray | int = 0
    later: IntArray | int = 0


def _kinds(parts: Parts, slots: Sequence[int], counts: IntArray, chosen: IntArray, vpp: IntArray) -> Iterator[_Kind]:
    """The kinds of layers of a model; where only some run as their kind does, `chosen`, the others are one more."""
    for index, (slot, tape) in enumerate(zip(slots, parts.blocks, strict=True)):
        name = "layer" if len(slots) == 1 else f"layer of kind {index + 1}"
        name = f"region of {parts.region} layers" if parts.region > 1 else name
        layers = regions(counts[:, :, slot], vpp, parts.region)
        if not parts.between:
            yield _Kind(name, slot, tape, layers)
            continue
        kept, again = parts.between[index], chosen[:, :, index]
        others = layers - again
        ahead, after = (ceil_div(t.saved[:, None] * n, vpp) for t, n in ((tape, again), (kept, others)))
        apart = parts.first > 0
        yield _Kind(f"recomputed {name}", slot, tape, again, later=after * apart)
        yield _Kind(f"kept {name}", slot, kept, others, earlier=ahead * apart)


def _neighbours(
    inventory: Inventory, plans: Plans, kinds: Sequence[_Kind], counts: IntArray
) -> tuple[dict[int, IntArray], dict[int, IntArray]]:
    """Slot -> [plans, rows] bytes that layers of other slots keep before its first layer, and after its last."""
    slots = [slot for slot, _ in inventory.layers]
    nothing = np.zeros(counts.shape[:2], dtype=np.int64)
    if len(slots) == 1:
        return {slots[0]: nothing}, {slots[0]: nothing}
    kept = dict.fromkeys(slots, nothing)
    for kind in kinds:
        kept[kind.slot] = kept[kind.slot] + kind.tape.saved[:, None] * kind.layers
    each = np.stack([kept[slot] // np.maximum(counts[:, :, slot], 1) for slot in slots], axis=-1)
    orders = inventory.stage_order(plans, counts.shape[1])
    earlier, later = (np.einsum("urkj,urj->urk", order, each) for order in orders)
    return (
        {slot: earlier[:, :, index] for index, slot in enumerate(slots)},
        {slot: later[:, :, index] for index, slot in enumerate(slots)},
    )


class _Stages:
    def __init__(self, inventory: Inventory, plans: Plans, counts: IntArray, pp_stage: IntArray) -> None:
        self.at = inventory.table.at
        self.parts = parts_of(inventory, plans)
        self.with_weights = inventory.setting.profile.memory.unit_gradients
        self.overlaps = PASSING[inventory.setting.profile.memory.passing].overlaps
        self.counts = counts
        slots, vpp = [slot for slot, _ in inventory.layers], plans.vpp[:, None]
        whole_kinds = list(_kinds(self.parts, slots, counts, inventory.recomputed(plans), vpp))
        self.kinds = [kind._replace(layers=on_card(inventory.setting, kind.layers)) for kind in whole_kinds]
        away = zip(whole_kinds, self.kinds, strict=True)
        self.host = sum(
            (whole.tape.saved[:, None] * (whole.layers - kind.layers) for whole, kind in away), np.zeros_like(pp_stage)
        )
        self.losses = inventory.losses(counts)
        self.embeds = counts[:, :, self.at.embedding] > 0
        self.embedded = self.embeds * self.parts.embedding.saved[:, None]
        self.earlier, self.later = _neighbours(inventory, plans, self.kinds, counts)
        saved = sum((kind.tape.saved[:, None] * kind.layers for kind in self.kinds), np.zeros_like(pp_stage))
        whole = saved + self.embedded + _handed_on(inventory, plans, counts)
        schedule = find_schedule(inventory.setting.scenario.schedule)
        chunks, late = schedule.in_flight(plans, pp_stage), schedule.inputs_kept(plans, pp_stage)
        # the micro-batch that runs now is one of those in flight
        nothing = np.zeros_like(plans.mbs)
        beside = (self.losses > 0) * (self.parts.beside + nothing)[:, None]
        standing = (counts.sum(axis=2) > 0) * (self.parts.standing + nothing)[:, None]
        self.received = received_bytes(inventory, plans, counts) + standing + beside
        self.others = ceil_div(whole, vpp) * np.maximum(chunks - vpp, 0) + self._late(late, vpp) + self.received
        waiting = self._losses_waiting(schedule, plans, chunks)
        if waiting is not None:
            self.others = self.others + self.losses * waiting * self.parts.final.saved[:, None]
        self.chunk = np.where(chunks < vpp, ceil_div(whole, vpp) * chunks, whole)
        self.behind = nothing[:, None]
        self.hooked = 2 * inputs_stay(inventory.setting)
        if schedule.releases == "weight" and any((kind.tape.put_off > kind.tape.saved).any() for kind in self.kinds):
            self._hold_graphs(plans, pp_stage, chunks)

    def _hold_graphs(self, plans: Plans, pp_stage: IntArray, chunks: IntArray) -> None:
        """Where the gradients of weights alone let go of anything, what has run backward keeps all that these need.

        So do as many chunks as stages lie before, and the layers of the one that runs; but the first chunk of all, into
        which no gradient goes, runs both at once.
        """
        vpp = plans.vpp[:, None]
        waiting = np.minimum(pp_stage, np.maximum(chunks - vpp, 0))
        more = (np.maximum(kind.tape.put_off - kind.tape.saved, 0)[:, None] * kind.layers for kind in self.kinds)
        self.others = self.others + ceil_div(sum(more, np.zeros_like(chunks)), vpp) * waiting
        late = self._late(np.ones_like(chunks), vpp) + self.losses * self.parts.final.saved[:, None]
        self.behind = np.where(self.embeds, 0, late)

    @staticmethod
    def _losses_waiting(schedule: Schedule, plans: Plans, chunks: IntArray) -> IntArray | None:
        """[plans, rows]: losses kept beside the one that runs, on the last stage; None: none anywhere.

        One waits like the layers before it: for its turn where a stage has one chunk, all of them under GPipe; and for
        gradients of weights that are put off, by as many backwards as stages lie before.
        """
        if schedule.releases == "weight":
            return np.minimum(plans.num_microbatches, plans.pp)[:, None] - 1
        return None if schedule.turns else np.maximum(chunks - 1, 0)

    def _late(self, chunks: IntArray, vpp: IntArray) -> IntArray:
        """[plans, rows]: of chunks that have run backward but for gradients of weights, an output layer included."""
        layers = sum((kind.tape.put_off[:, None] * kind.layers for kind in self.kinds), np.zeros_like(chunks))
        ends = self.losses * self.parts.final.put_off[:, None] if self.parts.final.factors else 0
        return ceil_div(layers, vpp) * chunks + ends * (chunks // vpp)

    def active(self) -> Active:
        places = [*self._forward(), *self._output(), *self._backward(), *_idle(self.received)]
        saved = self.others + self.chunk + self.losses * self.parts.final.saved[:, None]
        return Active(places=tuple(places), saved=saved, host=self.host)

    def _peak(self, tape: Tape, phase: Literal["forward", "backward"]) -> tuple[IntArray, IntArray]:
        if phase == "forward":
            return tape.peak("forward")
        return tape.peak("backward", weights=self.with_weights)

    def _place(
        self,
        phase: Literal["forward", "backward"],
        what: str,
        slot: int,
        tape: Tape,
        kept: IntArray,
        here: BoolArray,
        *,
        first: bool = False,
    ) -> Place:
        most, at = self._peak(tape, phase)
        last = phase == "backward" and not first
        return Place(
            label=f"{phase} of {what}",
            states="backward" if last else "loss",
            part=phase,
            slot=slot,
            first=first,
            kept=kept,
            walked=np.broadcast_to(most[:, None], kept.shape),
            here=here,
            tape=tape,
            at=at,
        )

    def _forward(self) -> list[Place]:
        """The last layer of each kind runs forward: those of its chunk that come before it have kept theirs."""
        places: list[Place] = []
        for kind in self.kinds:
            kept = self._before(kind)
            places.append(self._place("forward", f"the last {kind.name}", kind.slot, kind.tape, kept, kind.layers > 0))
        return places

    def _output(self) -> list[Place]:
        tape, here = self.parts.final, self.losses > 0
        kept = self.others + self.chunk + np.maximum(self.losses - 1, 0) * tape.saved[:, None]
        what = "the output layer and loss"
        backward = self._place("backward", what, self.at.final, tape, kept, here, first=True)
        return [self._place("forward", what, self.at.final, tape, kept, here), backward, self._handed(backward, tape)]

    def _backward(self) -> list[Place]:
        places: list[Place] = []
        for kind in self.kinds:
            tape, here = kind.tape, kind.layers > 0
            ends = (
                (True, self._before(kind)),
                (False, self._first(kind)),
            )
            for first, kept in ends:
                what = f"the {'last' if first else 'first'} {kind.name}"
                place = self._place("backward", what, kind.slot, tape, kept, here, first=first)
                places += [place, self._handed(place, tape)]
                if first and self.overlaps:
                    places.append(self._second(place, kind))
        tape, kept = self.parts.embedding, self.others + self._stay()
        place = self._place("backward", "the embedding", self.at.embedding, tape, kept, self.embeds)
        return [*places, place, self._handed(place, tape)]

    def _first(self, kind: _Kind) -> IntArray:
        """[plans, rows]: what waits when the first layer of a kind runs backward, after all others."""
        waits = self.others + self.embedded + self.earlier[kind.slot] + kind.earlier + self._behind(kind)
        return waits + np.maximum(self._stay() - self.hooked * kind.tape.saved[:, None], 0)

    def _stay(self) -> IntArray:
        """[plans, rows]: inputs of layers, and their gradients, that stay until the backward is over (layers.py)."""
        each = (kind.tape.saved[:, None] * kind.layers for kind in self.kinds)
        return self.hooked * sum(each, np.zeros_like(self.others))

    def _behind(self, kind: _Kind) -> IntArray:
        """[plans, rows]: what layers of the same chunk keep that have run backward, when the first of a kind does."""
        return np.maximum(self.behind - kind.tape.put_off[:, None], 0)

    def _before(self, kind: _Kind) -> IntArray:
        """[plans, rows]: what waits when the last layer of a kind runs: all but its own and what later layers keep."""
        own = kind.tape.saved[:, None] + self.later[kind.slot] + kind.later
        return self.others + self.chunk - np.minimum(own, self.chunk)

    def _second(self, place: Place, kind: _Kind) -> Place:
        """The next layer runs backward: one has run, at least the one that keeps least, and is being handed over."""
        gone = np.minimum.reduce([other.tape.saved for other in self.kinds])[:, None]
        return dataclasses.replace(
            place,
            label=f"backward of the last {kind.name} but one",
            part="second",
            kept=place.kept - np.minimum(gone, place.kept) + self.hooked * gone,
            here=kind.layers > 1,
        )

    @staticmethod
    def _handed(place: Place, tape: Tape) -> Place:
        """The layer has run: its activations are gone, and its gradients are handed over."""
        return dataclasses.replace(
            place,
            label=f"gradients handed over after the {place.label}",
            part="handed",
            walked=np.broadcast_to(tape.handed[:, None], place.kept.shape),
            tape=None,
            at=None,
        )
