"""A run of one stage, step by step, as requests to the allocator: its parts, its states and what its engine adds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from trainledger.account.memory.reserved.allocator import Event
from trainledger.account.memory.reserved.script import Phase, Script
from trainledger.account.memory.reserved.standing import Ends, Made, Standing
from trainledger.schedules import Op

COMPUTE, ALL_GATHER, REDUCE, BEFORE_GATHER = range(4)
"""Streams: of the model itself, of gathered weights, of reduced gradients, of shards that are made ready to travel."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A part of the model on a stage. key: its place in the stage's order; slots: of the tensors that it owns."""

    key: int
    slots: tuple[int, ...]
    script: Script


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The work of one stage.

    chunks    its layers in forward order, by chunk
    ops       one step's work
    releases  which kind of work lets go of what a micro-batch keeps; where that is the backward, and gradients of
              weights come later, what they multiply is kept until then
    received  bytes of the buffers that the whole run receives into; 0: boundary tensors come and go
    beside    bytes of what else is made once and stays: scratch memory of libraries, tables of a part
    """

    chunks: dict[int, list[Layer]]
    ops: tuple[Op, ...]
    releases: str
    received: int
    beside: tuple[int, ...] = ()

    @property
    def layers(self) -> list[Layer]:
        """Of all chunks."""
        return [layer for chunk in self.chunks.values() for layer in chunk]


class Requests:
    """Events so far, and the next id."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.next = 0

    def ids(self, count: int) -> int:
        """The first of so many new ids in a row."""
        self.next += count
        return self.next - count

    def alloc(self, sizes: Iterable[int], stream: int = COMPUTE) -> list[int]:
        """Ask for storages of these sizes; their ids."""
        wanted = [nbytes for nbytes in sizes if nbytes]
        first = self.ids(len(wanted))
        self.events.extend([("alloc", first + i, nbytes, stream) for i, nbytes in enumerate(wanted)])
        return list(range(first, self.next))

    def free(self, names: Iterable[int]) -> None:
        """Let go of storages."""
        self.events.extend([("free", name, 0, 0) for name in names])

    def play(self, phase: Phase, base: int, given: int, returned: int) -> None:
        """The requests of a part whose storages have ids from `base` on.

        given, returned   the storages that other parts made; -1: not this part's to let go of
        """
        start = len(self.events)
        self.events.extend([(op, base + i, nbytes, COMPUTE) for op, i, nbytes in phase.requests])
        for place, name in sorted(((phase.input_free, given), (phase.returned_free, returned)), reverse=True):
            if place >= 0 and name >= 0:
                self.events[start + place] = ("free", name, 0, 0)
            elif place >= 0:
                del self.events[start + place]


class States:
    """The buffers of the states table as they come and go."""

    def __init__(self, requests: Requests, standings: Sequence[Standing], layers: Sequence[Layer]) -> None:
        self.requests = requests
        self.layers = layers
        self.by_made: dict[Made, list[Standing]] = {}
        for standing in standings:
            self.by_made.setdefault(standing.made, []).append(standing)
        self.there: dict[Ends, dict[int, list[int]]] = {}
        self.done: set[tuple[Made, int]] = set()

    def make(self, when: Made, layer: Layer | None = None) -> None:
        """Make what begins now, of one layer or of the stage as a whole; a second call in a step makes nothing."""
        key = -1 if layer is None else layer.key
        if when not in self.by_made or (when, key) in self.done:
            return
        self.done.add((when, key))
        for standing in self.by_made[when]:
            if layer is None:
                sizes = (standing.whole,)
            else:
                sizes = tuple(nbytes for slot in layer.slots for nbytes in standing.by_slot.get(slot, ()))
            there = self.there.setdefault(standing.ends, {})
            there.setdefault(key, []).extend(self.requests.alloc(sizes))

    def make_all(self, when: Made) -> None:
        """Make what begins now, of the stage as a whole and of each layer."""
        self.make(when)
        for layer in self.layers:
            self.make(when, layer)

    def end(self, what: Ends, layer: Layer | None = None) -> None:
        """Let go of what ends now, of one layer or of all of them."""
        there = self.there.get(what, {})
        for key in list(there) if layer is None else [layer.key]:
            self.requests.free(there.pop(key, ()))

    def next_step(self) -> None:
        """What a step makes may be made again."""
        self.done = {entry for entry in self.done if entry[0] in ("start", "first step")}


class Engine:
    """What an engine asks for beside: nothing. The base of those that gather weights and reduce gradients."""

    def __init__(self, requests: Requests) -> None:
        self.requests = requests

    def start(self) -> None:
        """Weights are there, and no step has begun."""

    def before_forward(self, layer: Layer) -> None:
        """A part is about to run forward."""

    def after_forward(self, layer: Layer) -> None:
        """It has run."""

    def before_backward(self, layer: Layer) -> None:
        """A part is about to run backward."""

    def after_backward(self, layer: Layer, gradients: list[int], *, last: bool) -> None:
        """It has run, and these are the gradients of its weights; `last`: in this step for the last time."""
        del layer, last
        self.requests.free(gradients)

    def end_of_forward(self) -> None:
        """A micro-batch has run forward on this stage."""

    def end_of_backward(self, layers: Sequence[Layer], *, last: bool) -> None:
        """A micro-batch has run backward through the layers of a chunk."""

    def end_of_step(self) -> None:
        """The optimizer has stepped."""


@dataclasses.dataclass(slots=True)
class Ran:
    """A part between its forward and its backward. given: what it reads; owned: for it to let go of; base: its ids."""

    layer: Layer
    base: int
    given: int
    owned: bool
    linked: bool

    def name(self, storage: int, returned: int) -> int:
        """The id of one of its storages; -1 stays -1."""
        script = self.layer.script
        if storage < 0:
            return -1
        if storage == script.input:
            return self.given
        return returned if storage == script.returned else self.base + storage


class Run:
    """Steps of a stage, appended to the requests."""

    def __init__(self, requests: Requests, stage: Stage, states: States, engine: Engine) -> None:
        self.requests, self.stage, self.states, self.engine = requests, stage, states, engine
        self.going: dict[tuple[int, int], tuple[list[Ran], int]] = {}
        self.late: dict[tuple[int, int], list[int]] = {}
        self.splits = any(op.kind == "weight" for op in stage.ops)

    def start(self) -> None:
        """What is made before the first step and stays."""
        self.states.make_all("start")
        self.requests.alloc(self.stage.beside)
        self.engine.start()
        if self.stage.received:
            each = max(max(layer.script.input_bytes, layer.script.output_bytes) for layer in self.stage.layers)
            self.requests.alloc([each] * (self.stage.received // each))

    def has_run(self, ran: list[Ran]) -> None:
        """The last of these parts has run forward."""

    def runs_backward(self, ran: list[Ran], index: int) -> None:
        """The part at this place is about to run backward."""

    def step(self) -> None:
        """One optimizer step."""
        self.states.next_step()
        self.states.make("forward")
        last = {op.chunk: op.microbatch for op in self.stage.ops if op.kind == self.stage.releases}
        for op in self.stage.ops:
            if op.kind == "forward":
                self._forward(op.chunk, op.microbatch)
            elif op.kind == self.stage.releases:
                self._backward(op.chunk, op.microbatch, last=op.microbatch == last[op.chunk])
            elif op.kind == "backward":
                # it lets go of nothing and leaves gradients for those of weights, unless no gradient goes further
                layers = self.stage.chunks[op.chunk]
                sizes = [layer.script.more for layer in layers if layers[0].script.input >= 0]
                self.late[op.chunk, op.microbatch] = self.requests.alloc(sizes)
            if op.kind == "weight":
                self.requests.free(self.late.pop((op.chunk, op.microbatch), ()))
        self.states.end("last backward of the layer")
        self.states.end("backward")
        self.states.make_all("first step")
        self.states.make_all("step")
        self.states.end("step")
        self.engine.end_of_step()

    def _forward(self, chunk: int, microbatch: int) -> None:
        ran: list[Ran] = []
        current, owned = -1, True
        for layer in self.stage.chunks[chunk]:
            script = layer.script
            self.engine.before_forward(layer)
            self.states.make("forward", layer)
            linked = current >= 0
            if script.input >= 0 and not linked:
                # from the stage before, into a buffer that is there for the whole run or a new one
                standing = bool(self.stage.received) and not ran
                current, owned = (-1, False) if standing else (self.requests.alloc([script.input_bytes])[0], True)
            base = self.requests.ids(script.size)
            ran.append(Ran(layer, base, current, owned, linked))
            self.requests.play(script.forward, base, current if owned else -1, -1)
            self.engine.after_forward(layer)
            self.has_run(ran)
            current, owned = ran[-1].name(script.output, -1), not script.keeps_output
        self.engine.end_of_forward()
        handed = current if owned else -1
        if handed >= 0 and not self.stage.received:
            self.requests.free([handed])
            handed = -1
        self.going[chunk, microbatch] = (ran, handed)

    def _backward(self, chunk: int, microbatch: int, *, last: bool) -> None:
        ran, handed = self.going.pop((chunk, microbatch))
        gradient, lowest = -1, ran[0].layer.script.input < 0
        for below, part in reversed(list(enumerate(ran))):
            layer, script = part.layer, part.layer.script
            self.runs_backward(ran, below)
            self.engine.before_backward(layer)
            if last and below <= lowest:
                self.states.make("last backward")
            if script.returned >= 0 and gradient < 0:
                gradient = self.requests.alloc([script.output_bytes])[0]
            self.requests.play(script.backward, part.base, part.given if part.owned else -1, gradient)
            self.states.make("backward")
            self.states.make("backward", layer)
            if last:
                self.states.make("last backward", layer)
            self.engine.after_backward(layer, [part.base + i for i, _ in script.gradients], last=last)
            if last:
                self.states.end("last backward of the layer", layer)
            gradient = part.name(script.leaves, gradient)
            if gradient >= 0 and not part.linked:
                self.requests.free([gradient])
                gradient = -1
        self.requests.free([handed] if handed >= 0 else [])
        if self.splits and self.stage.releases == "backward":
            sizes = [nbytes for part in ran for nbytes in part.layer.script.late]
            self.late[chunk, microbatch] = self.requests.alloc(sizes)
        self.engine.end_of_backward(self.stage.chunks[chunk], last=last)
