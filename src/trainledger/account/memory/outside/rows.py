"""What an engine's profile says that a run holds while it loads and while it saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from trainledger.account.memory.outside.line import Outside, on_node, ranks_of_node
from trainledger.account.shares import Shares, shares
from trainledger.account.states import buffer_bytes
from trainledger.inventory.buffers import Buffer, buffers_of
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import make_plans
from trainledger.plans.setting import Setting
from trainledger.profiles.profile import OutsideRow


def from_profile(inventory: Inventory, own: Shares) -> Iterator[Outside]:
    """The rows of the profile that hold of a single plan."""
    setting, zero = inventory.setting, int(own.plans.zero_stage[0])
    rows = [
        row for row in setting.profile.outside if zero in row.zero and row.quantised in (None, setting.workload.qlora)
    ]
    whole = _whole(inventory, zero) if any(row.whole for row in rows) else own
    # a checkpoint has one copy of each tensor
    workload = msgspec.structs.replace(setting.workload, frozen_copy=0, ema=False)
    alone = dataclasses.replace(setting, workload=workload)
    for row in rows:
        # sizes are remembered by the identity of a buffer, which here does not outlive the row
        held = dataclasses.replace(whole if row.whole else own, sizes={})
        ranks = ranks_of_node(setting, own.plans) if row.every else 1
        line = _line(setting, row, held, buffers_of(row.parts, alone, inventory.table), ranks)
        if line is not None:
            yield line


def _whole(inventory: Inventory, zero: int) -> Shares:
    """The model as one rank owns it that shares nothing."""
    undivided = Inventory(inventory.setting.under(pp_layout=()))
    return shares(undivided, make_plans({"zero_stage": zero}))


def _line(setting: Setting, row: OutsideRow, held: Shares, buffers: Sequence[Buffer], ranks: int) -> Outside | None:
    """Of the rank that holds most, times those that hold the same."""
    if not buffers:
        return None
    amounts = np.stack([buffer_bytes(held, buffer)[0] for buffer in buffers])
    fullest = amounts[:, int(amounts.sum(axis=0).argmax())]
    parts = [_part(held, buffer, amount) for buffer, amount in zip(buffers, fullest.tolist(), strict=True) if amount]
    times = f"; on each of {ranks} ranks of a node" if ranks > 1 else ""
    return Outside(
        what=row.what,
        when=row.when,
        place=row.place,
        per=row.per,
        amount=int(fullest.sum()) * ranks,
        basis=on_node(setting, [row.basis]) if row.every else row.basis,
        formula=f"{' + '.join(parts)}{times}",
        cites=(row.cite,) if row.cite else (),
    )


def _part(held: Shares, buffer: Buffer, amount: int) -> str:
    ranks = int(held.over(buffer.row.sharded_from)[0][0])
    return f"{buffer.what} in {buffer.dtype}{f' over {ranks}' if ranks > 1 else ''} {amount} B"
