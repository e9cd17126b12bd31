"""Everything that is observed of one rank, from before its model is built to the end of its last step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import msgspec
import torch

from trainledger.lines import Instant, Line, line_id
from trainledger.runtime.observe.clock import Clock
from trainledger.runtime.observe.collectives import CollectiveCounter
from trainledger.runtime.observe.dispatch import Watching, watching
from trainledger.runtime.observe.flop import FlopCounter
from trainledger.runtime.observe.held import snapshot
from trainledger.runtime.observe.numbered import called, numbers
from trainledger.runtime.observe.observation import Group, Held, Observation
from trainledger.runtime.observe.storages import StorageTracker
from trainledger.runtime.observe.strangers import UNSEEN, Strangers


class Observer:
    """Watches a rank: storages from the start, and in the observed step collectives, FLOP, time and peak too.

        observer = Observer(names)
        with observer.watching():
            program = ...
            with observer.observing():
                program.step(last, observer)
        observation = observer.result(rank, digest, losses)

    names         PyTorch's name of a process group to the ledger's; may be filled later
    synchronize   waits for the device, so that a phase ends when its work does
    storages      all that are alive
    collectives   those of the observed step, one event each
    """

    def __init__(self, names: Mapping[str, str], synchronize: Callable[[], None] | None = None) -> None:
        self.clock = Clock(synchronize)
        self.storages = StorageTracker(self.clock)
        self.collectives = CollectiveCounter(names, self.clock)
        self.flop = FlopCounter()
        self._mode: Watching | None = None
        self._strangers: Strangers | None = None
        self._held: list[Held] = []
        self._peak_bytes = 0
        self._gathered: dict[str, int] = {}
        self._names = names
        self._groups: tuple[Group, ...] = ()

    @contextmanager
    def watching(self) -> Generator[None]:
        """Know every storage from here on."""
        self._strangers = Strangers()
        with self.storages.following_resizes(), watching(self.storages) as mode:
            self._mode = mode
            try:
                yield
            finally:
                self._mode = self._strangers = None

    @contextmanager
    def observing(self) -> Generator[None]:
        """Observe what happens within: the last step, once. Forgets the instants before it."""
        assert self._mode is not None, "a step is observed inside watching()"
        self._held.clear()
        self.storages.mark()
        self._mode.watchers = (self.storages, self.collectives, self.flop)
        self.clock.measured = True
        before = numbers()
        try:
            with self.clock.phase("step"):
                yield
            self._groups = called(before, (event.group for event in self.collectives.events))
        finally:
            self.clock.measured = False
            self._mode.watchers = (self.storages,)
            self.storages.bury()
            self._peak_bytes = self.storages.peak_bytes
            self._gathered = self.storages.gathered

    def phase(self, name: str) -> AbstractContextManager[None]:
        """What happens within is of this phase."""
        return self.clock.phase(name)

    def labelled(self, category: str, name: str) -> AbstractContextManager[None]:
        """What is born within and never named is `held/<category>/<name>`: what a program cannot name."""
        return self.storages.labelled(category, name)

    def group(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """Sum these tensors' storages as one group of what is gathered."""
        self.storages.group(name, tensors)

    def instant(self, instant: Instant, named: Iterable[tuple[str, str, torch.Tensor]]) -> None:
        """Note what is alive, with (category, name, tensor) of all that the plan lets this rank keep."""
        with self.clock.paused():
            if self._strangers is not None and self.clock.measured and instant != "loss":
                self.storages.adopt(self._strangers.found(), UNSEEN)
            self._held.append(snapshot(self.storages, named, instant))

    def result(self, rank: int, digest: str, losses: Sequence[float]) -> Observation:
        """What was observed."""
        return Observation(
            rank=rank,
            digest=digest,
            held=tuple(self._held),
            calls=self.collectives.calls(),
            flop=dict(self.flop.flop),
            phases_s=dict(self.clock.seconds),
            losses=tuple(losses),
            gathered=dict(self._gathered),
            groups=tuple(msgspec.structs.replace(of, name=self._names.get(of.name, of.name)) for of in self._groups),
            reported=tuple(self._reported()),
            torch_version=str(torch.__version__),
        )

    def _reported(self) -> Iterator[Line]:
        for held in self._held:
            if held.instant == "loss":
                saved = sum(storage.bytes for storage in held.unclaimed)
                yield _bytes_line("activations", "saved for backward", saved, "alive after the loss, under no name")
        yield _bytes_line("peak", "allocated", self._peak_bytes, "most alive between two operations of the step")


def _bytes_line(category: str, what: str, amount: int, formula: str) -> Line:
    return Line(id=line_id("held", category, what), amount=amount, unit="B", basis="exact", formula=formula)
