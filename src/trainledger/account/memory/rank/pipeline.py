"""A step of one stage of a pipeline: its chunks in the order of the schedule, with what waits to be sent.

[torch: distributed/pipelining/stage.py, schedules.py]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainledger.account.memory.rank.piece import Piece
from trainledger.account.memory.rank.runs import run_backward, run_for_inputs, run_for_weights, run_forward
from trainledger.account.memory.rank.tally import Tally
from trainledger.account.memory.rank.units import DataParallel
from trainledger.schedules import Op


class Chunk:
    """A virtual stage: its parts, its data parallelism, and what each micro-batch shares between its parts."""

    def __init__(self, tally: Tally, data: DataParallel, pieces: Sequence[Piece], shared: int) -> None:
        self.tally = tally
        self.data = data
        self.pieces = pieces
        self.shared = shared
        self.done = 0
        self.left = 0

    @property
    def gives(self) -> int:
        """Bytes of what it gives: hidden states, or logits beside a loss."""
        return next(piece.given for piece in reversed(self.pieces) if piece.given)

    @property
    def sends(self) -> bool:
        """What it gives is sent on; the last of all has a loss instead."""
        return self.pieces[-1].given > 0

    @property
    def hands(self) -> int:
        """Bytes of the gradient that it sends back; none where it begins with token ids."""
        return self.pieces[0].handed

    def forward(self) -> None:
        """A micro-batch runs forward; what it gives stays until its backward is over."""
        self.tally.add("rotary tables", self.shared)
        run_forward(self.tally, self.data, self.pieces)

    def backward(self) -> None:
        """A micro-batch runs backward."""
        run_backward(self.tally, self.data, self.pieces)
        self.data.finish()
        self.tally.drop(self.shared)
        self.done += 1

    def backward_for_inputs(self) -> None:
        """The same for what came in alone; the rest stays until the gradients of weights are computed."""
        self.left = run_for_inputs(self.tally, self.data, self.pieces)

    def backward_for_weights(self) -> None:
        """The gradients of weights that were put off."""
        run_for_weights(self.tally, self.data, self.pieces, self.left)
        self.data.finish()
        self.tally.drop(self.shared)
        self.done += 1


class OneByOne:
    """1F1B's own loop, whose variables hold the last output and the last gradient until the next of each.

    held   a request holds what it sends: the one before the last of the warm-up stays in a variable until forwards end
    """

    def __init__(self, tally: Tally, chunk: Chunk, *, held: bool) -> None:
        self.tally = tally
        self.chunk = chunk
        self.held = held
        self.latest = -1
        self.requested = -1
        self.waiting: set[int] = set()
        self.sent = 0

    def run(self, ops: Sequence[Op]) -> None:
        """The step up to the reduction of its gradients, which happens before the loop returns."""
        forwards = sum(op.kind == "forward" for op in ops)
        warm_up = next(index for index, op in enumerate(ops) if op.kind == "backward")
        if self.held and self.chunk.sends:
            self.requested = warm_up - 2
        for op in ops:
            if op.kind == "forward":
                self._forward(op.microbatch)
            else:
                self._backward(op.microbatch)
                if self.latest == forwards - 1:
                    self._let_go()
        self.chunk.data.reduce_all()
        self.tally.drop(self.chunk.gives + self.sent)

    def _forward(self, batch: int) -> None:
        self.chunk.forward()
        self.tally.add("output", self.chunk.gives)
        before, self.latest = self.latest, batch
        self.waiting.add(batch)
        self._drop(before)

    def _backward(self, batch: int) -> None:
        self.chunk.backward()
        self.waiting.remove(batch)
        self._drop(batch)
        self.tally.add("gradient to send", self.chunk.hands)
        self.tally.drop(self.sent)
        self.sent = self.chunk.hands

    def _drop(self, batch: int) -> None:
        """The output of a micro-batch goes, unless something holds it still."""
        if batch >= 0 and batch not in self.waiting and batch not in (self.latest, self.requested):
            self.tally.drop(self.chunk.gives)

    def _let_go(self) -> None:
        """No forward follows: the variable takes requests of gradients from here on."""
        batch, self.requested = self.requested, -1
        self._drop(batch)


class Planned:
    """A schedule of actions: units are gathered ahead, and what is sent is held by its request until the step's end.

    held   requests hold what they send
    """

    def __init__(self, tally: Tally, chunks: Mapping[int, Chunk], num_microbatches: int, *, held: bool) -> None:
        self.tally = tally
        self.chunks = chunks
        self.num_microbatches = num_microbatches
        self.held = held
        self.sent = 0

    def run(self, ops: Sequence[Op]) -> None:
        """The whole step."""
        for chunk in self.chunks.values():
            chunk.data.ask_all()
        split = {op.chunk for op in ops if op.kind == "weight"} - {0}
        for op in ops:
            chunk = self.chunks[op.chunk]
            chunk.data.wait_all()
            match op.kind:
                case "forward":
                    chunk.forward()
                    self.tally.add("output", chunk.gives)
                case "backward" if op.chunk in split:
                    chunk.backward_for_inputs()
                    self._sent(chunk)
                    if not chunk.sends:
                        self.tally.drop(chunk.gives)
                case "weight" if op.chunk in split:
                    chunk.backward_for_weights()
                    if chunk.sends:
                        self._over(chunk)
                case _ if op.kind == "weight" or not any(other.kind == "weight" for other in ops):
                    chunk.backward()
                    self._sent(chunk)
                    self._over(chunk)
                case _:  # the first chunk has no input that needs a gradient: its weights' are all that it computes
                    pass
            if chunk.done == self.num_microbatches:
                chunk.data.reduce_all()
                chunk.done = 0
        self.tally.drop(self.sent)

    def _sent(self, chunk: Chunk) -> None:
        """The gradient of its input has been asked to be sent."""
        if self.held:
            self.tally.add("gradient to send", chunk.hands)
            self.sent += chunk.hands

    def _over(self, chunk: Chunk) -> None:
        """After a backward its output is the requests' alone."""
        if self.held and chunk.sends:
            self.sent += chunk.gives
        else:
            self.tally.drop(chunk.gives)
