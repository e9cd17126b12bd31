"""Host memory that a run holds all the time: offloaded states, and what page-locked memory takes beside them.

PyTorch rounds a page-locked allocation up to a power of two. [torch-pinned]
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainledger.account.memory.layers import ON_CARD, on_card, regions
from trainledger.account.memory.outside.line import Outside, least_sure, on_node, ranks_of_node
from trainledger.account.memory.stage import StageMemory
from trainledger.account.shares import Shares
from trainledger.account.states import buffer_bytes, on_host, standing, tensor_bytes
from trainledger.arrays import IntArray, ints
from trainledger.dtypes import bits
from trainledger.inventory.blocks import parts_of
from trainledger.inventory.buffers import Buffer
from trainledger.inventory.inventory import Inventory
from trainledger.lines import Basis


def offloaded(inventory: Inventory, own: Shares) -> Iterator[Outside]:
    """The states of a single plan in host memory, the rounding beside them, and both of a whole node."""
    setting = inventory.setting
    kept = [
        buffer
        for buffer in inventory.buffers
        if on_host(buffer, setting.offload_moves) and standing(own, buffer)[1] and buffer_bytes(own, buffer)[0].any()
    ]
    if not kept:
        return
    states = np.sum([buffer_bytes(own, buffer)[0] for buffer in kept], axis=0)
    rounding = np.sum([_rounding(inventory, own, buffer) for buffer in kept], axis=0)
    row = int((states + rounding).argmax())
    held, beside, ranks = int(states[row]), int(rounding[row]), ranks_of_node(setting, own.plans)
    bases: list[Basis] = [buffer.row.basis for buffer in kept]
    cites = tuple(dict.fromkeys(buffer.row.cite for buffer in kept if buffer.row.cite))
    parts = " + ".join(f"{b.what} in {b.dtype} {int(buffer_bytes(own, b)[0, row])} B" for b in kept)
    yield Outside(
        what="offloaded states",
        when="all the time",
        place="host",
        per="rank",
        amount=held,
        basis=least_sure(bases),
        formula=parts,
        cites=cites,
    )
    yield Outside(
        what="page-locked memory beyond what it holds",
        when="all the time",
        place="host",
        per="rank",
        amount=beside,
        basis="modelled",
        formula="each page-locked storage takes the next power of two of its bytes",
        cites=("torch-pinned",),
    )
    yield Outside(
        what="offloaded states of a node",
        when="all the time",
        place="host",
        per="node",
        amount=(held + beside) * ranks,
        basis=on_node(setting, [*bases, "modelled"] if beside else bases),
        formula=f"({held} B + {beside} B of rounding) x {ranks} ranks of a node",
        cites=(*cites, *(["torch-pinned"] if beside else [])),
    )


def activations(inventory: Inventory, own: Shares, stages: StageMemory) -> Iterator[Outside]:
    """What layers of a single plan keep in host memory between their forward and their backward."""
    setting, held = inventory.setting, stages.active.host[stages.which[0]]
    if not held.any():
        return
    row, ranks = int(held.argmax()), ranks_of_node(setting, own.plans)
    beside = _storages_rounded(inventory, own, row)
    cites = setting.profile.offload["activations"].cites
    for what, amount, per, formula in (
        ("offloaded activations", int(held[row]), "rank", f"kept tensors of all layers but {ON_CARD}"),
        (
            "page-locked memory beyond offloaded activations",
            beside,
            "rank",
            "each tensor takes the next power of two of its bytes",
        ),
        (
            "offloaded activations of a node",
            (int(held[row]) + beside) * ranks,
            "node",
            f"({held[row]} B + {beside} B of rounding) x {ranks} ranks of a node",
        ),
    ):
        yield Outside(
            what=what,
            when="all the time",
            place="host",
            per="node" if per == "node" else "rank",
            amount=amount,
            basis=on_node(setting, ["modelled"]) if per == "node" else "modelled",
            formula=formula,
            cites=(*cites, "torch-pinned"),
        )


def _storages_rounded(inventory: Inventory, own: Shares, row: int) -> int:
    """What the page-locked copies of a stage's kept tensors take beyond their bytes."""
    parts, total = parts_of(inventory, own.plans), 0
    for (slot, _), tape in zip(inventory.layers, parts.blocks, strict=True):
        layers = regions(own.counts[:, :, slot], own.plans.vpp[:, None], parts.region)
        away = int((layers - on_card(inventory.setting, layers))[0, row])
        total += away * int(_beyond(tape.bytes[tape.waits][:, 0]).sum())
    return total


def _rounding(inventory: Inventory, own: Shares, buffer: Buffer) -> IntArray:
    """[rows]: what the page-locked storages of one buffer take beyond its bytes."""
    row, amount = buffer.row, buffer_bytes(own, buffer)[0]
    if row.pinned == "one":
        most = row.pinned_elements * bits(buffer.dtype) // 8 or int(amount.max())
        whole, rest = np.divmod(amount, max(most, 1))
        return whole * _beyond(ints([most])) + _beyond(rest)
    if (row.pinned == "each" or _moved_pinned(inventory, buffer)) and buffer.per_tensor:
        return (own.held[0] * _beyond(tensor_bytes(own, buffer)[0])).sum(axis=-1) * (row.copies * buffer.copies)
    return np.zeros_like(amount)


def _moved_pinned(inventory: Inventory, buffer: Buffer) -> bool:
    places = inventory.setting.profile.offload
    pinned = [places[name].pinned for name in inventory.setting.scenario.offload if name in places]
    return buffer.row.place == "device" and any(buffer.row.category in categories for categories in pinned)


def power_of_two(amount: IntArray) -> IntArray:
    """The next power of two from each amount on, exact below 2**53.

    >>> power_of_two(ints([1, 4, 5, 1 << 40, (1 << 40) + 1])).tolist() == [1, 4, 8, 1 << 40, 1 << 41]
    True
    """
    return np.left_shift(1, np.frexp(np.maximum(amount - 1, 0).astype(np.float64))[1].astype(np.int64))


def _beyond(amount: IntArray) -> IntArray:
    return np.where(amount > 0, power_of_two(amount) - amount, 0)
