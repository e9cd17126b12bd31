"""The states of one stage as storages of a run: how many bytes each has, what makes it and what ends it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from trainledger.account.shares import Shares
from trainledger.account.states import alive_at, buffer_bytes, on_host, standing, tensor_bytes
from trainledger.inventory.buffers import Buffer
from trainledger.inventory.inventory import Inventory
from trainledger.profiles.profile import INSTANTS, Instant

Made = Literal["start", "first step", "forward", "backward", "last backward", "step"]
"""Before the first step; in the first optimizer step, by an optimizer that makes its state when it needs it; or in
every step: before the first forward, after the first or the last backward of the layer, before the optimizer step."""
Ends = Literal["never", "last backward of the layer", "backward", "step"]
"""Never; in every step as the layer has run its last backward, as all backwards are over, or after the optimizer."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One buffer of the states table on one stage.

    by_slot   slot -> bytes of each of its tensors, of one layer; where tensors are storages of their own
    whole     bytes of the one storage it otherwise is
    """

    by_slot: dict[int, tuple[int, ...]]
    whole: int
    made: Made
    ends: Ends


def passes(buffer: Buffer) -> bool:
    """Whether a row of the states table only passes."""
    return buffer.row.passing


def standings(
    inventory: Inventory, own: Shares, row: int, left_out: Callable[[Buffer], bool] = passes
) -> tuple[Standing, ...]:
    """The buffers on the device for one stage of a single plan; what something else asks for is left out."""
    found: list[Standing] = []
    for buffer in inventory.buffers:
        _, anywhere = standing(own, buffer)
        if not anywhere or left_out(buffer) or on_host(buffer, inventory.setting.offload_moves):
            continue
        whole = int(buffer_bytes(own, buffer)[0, row])
        if not whole:
            continue
        made, ends = _life(buffer, {instant for instant in INSTANTS if _alive(own, buffer, instant)})
        by_slot = _by_slot(own, buffer) if buffer.per_tensor else {}
        found.append(Standing(by_slot=by_slot, whole=0 if by_slot else whole, made=made, ends=ends))
    return tuple(found)


def _alive(own: Shares, buffer: Buffer, instant: Instant) -> bool:
    alive = alive_at(buffer, instant, own.plans)
    return alive is not None and bool(alive if isinstance(alive, int) else alive.any())


def _by_slot(own: Shares, buffer: Buffer) -> dict[int, tuple[int, ...]]:
    sizes = tensor_bytes(own, buffer)[0] * (buffer.row.copies * buffer.copies)
    by_slot: dict[int, tuple[int, ...]] = {}
    for slot, nbytes in zip(own.table.slots.tolist(), sizes.tolist(), strict=True):
        if nbytes:
            by_slot[slot] = (*by_slot.get(slot, ()), nbytes)
    return by_slot


def _life(buffer: Buffer, alive: set[Instant]) -> tuple[Made, Ends]:
    """What makes a buffer and ends it, from the instants at which it is there.

    A gradient that is there at the loss is one that an earlier micro-batch left.
    """
    if len(alive) == len(INSTANTS):
        return ("first step" if buffer.row.dtype == "moments" and not buffer.row.eager else "start"), "never"
    ends: Ends = "step" if "step" in alive else "backward" if "backward" in alive else "last backward of the layer"
    if "loss" in alive:
        return ("backward" if buffer.row.category == "gradients" else "forward"), ends
    return ("last backward" if "backward" in alive else "step"), ends
