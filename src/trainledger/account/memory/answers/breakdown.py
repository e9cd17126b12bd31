"""What each pipeline stage holds where it holds most, in few parts that make up the whole: a bar each."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from trainledger.account.memory.meters import Meter
from trainledger.account.memory.stage import StageMemory


class StageParts(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline stage at its own highest place. Bytes; all but `free` sum to what the device meter shows.

    saved      activations that wait for a backward
    working    of the layer that runs: what it makes, and gradients on their way
    passing    gathered weights and gradients that are handed over, and buffers of the engine
    beside     workspaces, context and communicators
    unused     what the allocator keeps beside tensors: on the stage that holds most, and taken for the others
    free       what the card has left, negative where it is too small; None without a card
    """

    pp_stage: int
    place: str
    weights: int
    gradients: int
    optimizer: int
    saved: int
    working: int
    passing: int
    beside: int
    unused: int
    free: int | None

    @property
    def device(self) -> int:
        """What the device meter shows."""
        states, active = self.weights + self.gradients + self.optimizer, self.saved + self.working
        return states + active + self.passing + self.beside + self.unused


def breakdown(stages: StageMemory, usable: int | None, meters: Mapping[str, Meter]) -> tuple[StageParts, ...]:
    """Every distinct stage of a single plan, in order."""
    reserved = meters.get("reserved", meters["allocated"]).estimate
    unused = max(reserved - meters["allocated"].estimate, 0)
    totals = np.stack([stages.total(index)[0] for index in range(len(stages.places))])
    own, acting = int(stages.states.index[0]), int(stages.which[0])
    found: list[StageParts] = []
    for row in np.argsort(stages.pp_stage[0], kind="stable").tolist():
        index = int(totals[:, row].argmax())
        place, held = stages.places[index], stages.states.held
        here = bool(place.here[acting, row])
        to_come = int(stages.to_come(index)[own, row])
        parts = StageParts(
            pp_stage=int(stages.pp_stage[0, row]),
            place=place.label,
            weights=int(held["weights", place.states][own, row]),
            gradients=int(held["gradients", place.states][own, row]) - to_come,
            optimizer=int(held["optimizer", place.states][own, row]),
            saved=int(place.kept[acting, row]) * here,
            working=int(place.walked[acting, row]) * here,
            passing=int(held["buffers", place.states][own, row] + stages.passing[index][own, row]) + to_come,
            beside=stages.workspace_bytes + int(stages.beside[0]),
            unused=unused,
            free=None,
        )
        if usable is not None:
            parts = msgspec.structs.replace(parts, free=usable - parts.device)
        found.append(parts)
    return tuple(found)
