"""What of a run is neither a weight nor an optimizer state, and must survive it. No torch here."""

from __future__ import annotations

from typing import Any

import msgspec

from trainledger.errors import BadInput
from trainledger.runtime.train.metrics import Line
from trainledger.runtime.train.spec import TrainSpec


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Between two steps, the same on every rank.

    sequences   that have been trained on: where the data go on, in whatever layout
    losses      of the last steps, which the next one is compared with
    precision   scale of the loss, and layers that have fallen back
    data        digest of the tokens; seed, seq: what else decides which tokens come next
    """

    data: str
    seed: int
    seq: int
    step: int = 0
    tokens: int = 0
    sequences: int = 0
    skipped: int = 0
    loss: float | None = None
    held_out: float | None = None
    losses: tuple[float, ...] = ()
    precision: dict[str, Any] = {}

    def after(self, line: Line, spec: TrainSpec) -> State:
        """The state after a step."""
        assert line.loss is not None, "a loss that is no number ends the run"
        return msgspec.structs.replace(
            self,
            step=line.step,
            tokens=line.tokens,
            sequences=self.sequences + spec.run.sequences_per_step,
            skipped=self.skipped + line.skipped,
            loss=line.loss,
            losses=(*self.losses, line.loss)[-spec.spike_window :],
        )


def begun(spec: TrainSpec) -> State:
    """Before the first step."""
    return State(data=spec.data.digest, seed=spec.run.seed, seq=spec.run.seq)


def state_from(found: dict[str, Any], spec: TrainSpec, where: str) -> State:
    """The state that a checkpoint keeps; refused where the run would not go on with the tokens that come next."""
    state, fresh = msgspec.convert(found, State), begun(spec)
    for what, there, here in (
        ("tokens of SHA-256", state.data[:12], fresh.data[:12]),
        ("--seed", state.seed, fresh.seed),
        ("--seq", state.seq, fresh.seq),
    ):
        if there != here:
            raise BadInput(
                f"{where} is of a run with {what} {there}, and this one has {here}: it would not go on with the tokens "
                "that come next; take the same, or start anew in another folder with --out"
            )
    return state
