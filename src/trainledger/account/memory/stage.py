"""What one rank of each pipeline stage has allocated at each place of a step, and the place where that is most.

Layers of a kind are alike, so the walk of one stands for all, and only the first and the last that run backward differ
in what else is there. A place adds up: states, what micro-batches and layers beside this one keep, the walk of this
layer at its highest, and what passes (passing.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from trainledger.account.activations import in_flight_chunks
from trainledger.account.memory.engines import passing_of
from trainledger.account.shares import Shares, shares
from trainledger.account.states import StateAccount, account_of
from trainledger.arrays import IntArray, ceil_div
from trainledger.inventory.blocks import parts_of
from trainledger.inventory.inventory import Inventory
from trainledger.inventory.tape import Tape
from trainledger.inventory.tensors import BoolArray
from trainledger.plans.plan import Plans
from trainledger.profiles.profile import Instant


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """A place of the step.

    label      in words
    states     which instant's states are there
    kept       [plans, rows]: activations that wait, this layer's own left out
    walked     [plans, rows]: the layer's own at its highest instant
    passing    [plans, rows]: what passes
    here       [plans, rows]: which stages have the place at all
    tape       whose instant it is, and [plans] which; None: no layer runs
    """

    label: str
    states: Instant
    kept: IntArray
    walked: IntArray
    passing: IntArray
    here: BoolArray
    tape: Tape | None = None
    at: IntArray | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageMemory:
    """The places of a step. totals: [places, plans, rows]; saved: [plans, rows] kept by all micro-batches in flight."""

    places: tuple[Place, ...]
    states: StateAccount
    totals: IntArray
    saved: IntArray
    pp_stage: IntArray

    @property
    def allocated(self) -> IntArray:
        """[plans]: the most that any rank has allocated."""
        return self.totals.max(axis=(0, 2))

    def where(self, plan: int = 0) -> tuple[Place, int]:
        """The place that binds, and the row of its stage."""
        of_plan = self.totals[:, plan]
        place, row = np.unravel_index(int(of_plan.argmax()), of_plan.shape)
        return self.places[int(place)], int(row)


def stage_memory(inventory: Inventory, plans: Plans) -> StageMemory:
    """Every place of every distinct stage of each plan."""
    own = shares(inventory, plans)
    states = account_of(inventory, own, np.arange(len(plans)), passing=False)
    return _Stage(inventory, plans, own, states).memory()


class _Stage:
    def __init__(self, inventory: Inventory, plans: Plans, own: Shares, states: StateAccount) -> None:
        self.inventory = inventory
        self.states = states
        self.own = own
        self.passing = passing_of(inventory, own)
        self.parts = parts_of(inventory, plans)
        self.with_weights = inventory.setting.profile.memory.unit_gradients
        at = inventory.table.at
        self.slots = [slot for slot, _ in inventory.layers]
        self.counts = own.counts[:, :, self.slots]
        self.losses = inventory.losses(own.counts)
        self.saved_blocks = np.stack([tape.saved for tape in self.parts.blocks], axis=-1)
        self.blocks = np.einsum("uk,urk->ur", np.broadcast_to(self.saved_blocks, self._few()), self.counts)
        self.embedded = own.counts[:, :, at.embedding] * self.parts.embedding.saved[:, None]
        chunks = in_flight_chunks(plans, own.pp_stage, inventory.setting.scenario.schedule)
        per_chunk = ceil_div(self.blocks + self.embedded, plans.vpp[:, None])
        # the micro-batch that runs now is one of those in flight
        self.others = per_chunk * np.maximum(chunks - plans.vpp[:, None], 0)
        self.chunk = np.where(chunks < plans.vpp[:, None], per_chunk * chunks, self.blocks + self.embedded)

    def _few(self) -> tuple[int, int]:
        return (self.own.counts.shape[0], len(self.slots))

    def memory(self) -> StageMemory:
        places = [*self._forward(), *self._output(), *self._backward(), *self._ends()]
        totals = np.stack([self._total(place) for place in places])
        saved = self.others + self.chunk + self.losses * self.parts.final.saved[:, None]
        return StageMemory(
            places=tuple(places), states=self.states, totals=totals, saved=saved, pp_stage=self.own.pp_stage
        )

    def _total(self, place: Place) -> IntArray:
        whole = self.states.at(place.states) + place.kept + place.walked + place.passing
        return np.where(place.here, whole, 0)

    def _place(
        self,
        label: str,
        states: Instant,
        tape: Tape,
        phase: Callable[[Tape], tuple[IntArray, IntArray]],
        kept: IntArray,
        passing: IntArray,
        here: BoolArray,
    ) -> Place:
        most, at = phase(tape)
        walked = np.broadcast_to(most[:, None], kept.shape)
        return Place(label=label, states=states, kept=kept, walked=walked, passing=passing, here=here, tape=tape, at=at)

    def _forward(self) -> list[Place]:
        """The last layer of each kind runs forward: all others of its chunk have kept theirs."""
        places: list[Place] = []
        for index, (slot, tape) in enumerate(zip(self.slots, self.parts.blocks, strict=True)):
            kept = self.others + self.chunk - np.minimum(tape.saved[:, None], self.chunk)
            here = self.counts[:, :, index] > 0
            places.append(
                self._place(
                    f"forward of the last layer of kind {index}",
                    "loss",
                    tape,
                    _forward_peak,
                    kept,
                    self.passing.forward(slot),
                    here,
                )
            )
        return places

    def _output(self) -> list[Place]:
        tape, here = self.parts.final, self.losses > 0
        more = np.maximum(self.losses - 1, 0) * tape.saved[:, None]
        kept, passing = self.others + self.chunk + more, self.passing.loss()
        backward = self._backward_peak
        return [
            self._place("forward of the output layer and loss", "loss", tape, _forward_peak, kept, passing, here),
            self._place("backward of the loss and output layer", "loss", tape, backward, kept, passing, here),
        ]

    def _backward_peak(self, tape: Tape) -> tuple[IntArray, IntArray]:
        return tape.peak("backward", weights=self.with_weights)

    def _backward(self) -> list[Place]:
        places: list[Place] = []
        for index, (slot, tape) in enumerate(zip(self.slots, self.parts.blocks, strict=True)):
            here = self.counts[:, :, index] > 0
            own = np.minimum(tape.saved[:, None], self.chunk)
            top = self.others + self.chunk - own
            bottom = self.others + self.embedded
            ends: tuple[tuple[bool, IntArray, Instant], ...] = ((True, top, "loss"), (False, bottom, "backward"))
            for first, kept, states in ends:
                order = "first" if first else "last"
                passing = self.passing.backward(slot, first=first)
                label = f"backward of the {order} layer of kind {index}"
                places.append(self._place(label, states, tape, self._backward_peak, kept, passing, here))
                nothing = np.zeros_like(kept)
                places.append(
                    Place(
                        label=f"gradients of the {order} layer of kind {index} handed over",
                        states=states,
                        kept=kept,
                        walked=nothing + tape.handed[:, None],
                        passing=self.passing.reduced(slot, first=first),
                        here=here,
                    )
                )
        return places

    def _ends(self) -> list[Place]:
        at, tape = self.inventory.table.at, self.parts.embedding
        embedding = self.own.counts[:, :, at.embedding] > 0
        nothing, everywhere = np.zeros_like(self.others), np.ones_like(embedding)
        passing = self.passing.backward(at.embedding, first=False)
        held = self.others
        return [
            self._place("backward of the embedding", "backward", tape, self._backward_peak, held, passing, embedding),
            Place(
                label="gradients of the embedding handed over",
                states="backward",
                kept=held,
                walked=nothing,
                passing=self.passing.reduced(at.embedding, first=False),
                here=embedding,
            ),
            Place(
                label="end of backward",
                states="backward",
                kept=nothing,
                walked=nothing,
                passing=nothing,
                here=everywhere,
            ),
            Place(
                label="optimizer step", states="step", kept=nothing, walked=nothing, passing=nothing, here=everywhere
            ),
        ]


def _forward_peak(tape: Tape) -> tuple[IntArray, IntArray]:
    return tape.peak("forward")
