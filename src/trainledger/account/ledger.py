"""One plan in full: every line it holds and moves, on the pipeline stage that holds most."""

from __future__ import annotations

import dataclasses
from functools import cached_property, lru_cache

import msgspec
import numpy as np

from trainledger.account.memory import StageMemory, alive_at, beside, stage_memory
from trainledger.account.peak import Peak, peak_of
from trainledger.account.shares import Shares, shares
from trainledger.account.states import buffer_bytes, on_host, standing, tensor_bytes
from trainledger.account.traffic import all_traffic
from trainledger.account.traffic.collectives import Collective
from trainledger.inventory.buffers import Buffer
from trainledger.inventory.inventory import Inventory
from trainledger.lines import Line, line_id
from trainledger.plans.plan import Plans
from trainledger.profiles.profile import INSTANTS, Instant


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """A collective of one step on one rank, all calls together."""

    collective: str
    group: str
    what: str
    dtype: str
    ranks: int
    count: int
    in_bytes: int
    out_bytes: int
    wire_bytes: int
    cites: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A plan's account; its lines are put into words when they are asked for.

    where    the row of `own` that answers: the stage that holds most
    stages   the places of its step
    """

    inventory: Inventory
    own: Shares
    where: int
    peak: Peak
    stages: StageMemory
    traffic: tuple[Moved, ...]

    @property
    def wire_bytes(self) -> int:
        """Bytes that all collectives of a step send."""
        return sum(move.wire_bytes for move in self.traffic)

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """Every line held and moved."""
        held = _held_lines(self.inventory, self.own, self.where)
        moved = _moved_lines(self.traffic, self.where, self.own)
        return (*held, *_other_lines(self.inventory, self), *moved)


def entry(inventory: Inventory, plans: Plans) -> Entry:
    """The full account of a Plans of length one."""
    if len(plans) != 1:
        raise AssertionError("a ledger is one plan")
    own = shares(inventory, plans)
    stages = stage_memory(inventory, plans)
    peak = peak_of(stages)
    where = int(np.argmax(own.pp_stage[0] == peak.pp_stage))
    calls = all_traffic(inventory, own)
    moved = tuple(_moved(call, where) for call in calls if call.count[0, where])
    return Entry(inventory=inventory, own=own, where=where, peak=peak, stages=stages, traffic=moved)


def _moved(call: Collective, where: int) -> Moved:
    return Moved(
        collective=call.op,
        group=call.group,
        what=call.what,
        dtype=call.dtype,
        ranks=int(call.ranks[0]),
        count=int(call.count[0, where]),
        in_bytes=int(call.in_bytes[0, where]),
        out_bytes=int(call.out_bytes[0, where]),
        wire_bytes=round(float(call.wire_bytes()[0, where])),
        cites=(call.cite,) if call.cite else (),
    )


def _held_lines(inventory: Inventory, own: Shares, where: int) -> list[Line]:
    """One line per tensor where an engine keeps tensors apart, else one per buffer; those of 0 B are left out."""
    lines: list[Line] = []
    moves = inventory.setting.offload_moves
    stage = int(own.pp_stage[0, where])
    for buffer in inventory.buffers:
        if not standing(own, buffer)[1]:
            continue
        row = buffer.row
        group = "host" if on_host(buffer, moves) else ""
        formula = _formula(own, buffer)
        cites = (row.cite,) if row.cite else ()
        for what, amount in _amounts(own, buffer, where):
            if amount:
                lines.append(
                    Line(
                        id=line_id("held", row.category, what, group),
                        amount=amount,
                        unit="B",
                        basis=row.basis,
                        formula=formula,
                        cites=cites,
                        pp_stage=stage,
                    )
                )
    return lines


def _amounts(own: Shares, buffer: Buffer, where: int) -> list[tuple[str, int]]:
    """(what, bytes) of each line of a buffer."""
    row = buffer.row
    if not buffer.per_tensor:
        return [(buffer.what, int(buffer_bytes(own, buffer)[0, where]))]
    amounts = tensor_bytes(own, buffer)[0] * own.held[0, where] * (row.copies * buffer.copies)
    suffix = "" if row.what == buffer.what == row.category else f":{buffer.what}"
    return [(name + suffix, amount) for name, amount in zip(own.table.names, amounts.tolist(), strict=True)]


def _formula(own: Shares, buffer: Buffer) -> str:
    row, over = buffer.row, ""
    if int(own.plans.zero_stage[0]) >= row.sharded_from:
        dense, expert = int(own.dense[0]), int(own.expert[0])
        over = f" over {dense}"
        if expert != dense and bool((buffer.mask & own.table.expert).any()):
            over += f", experts over {expert}"
    kept = row.accumulates and int(own.plans.num_microbatches[0]) > 1
    return f"{buffer.dtype}, cut {row.cut}{over}; alive at {_instants(row.alive, kept)}"


@lru_cache(maxsize=32)
def _instants(alive: tuple[Instant, ...], accumulates: bool) -> str:
    return ",".join(i for i in INSTANTS if i in alive or (accumulates and i == "loss"))


def _other_lines(inventory: Inventory, entry: Entry) -> list[Line]:
    """What is alive beside states at the highest place: activations, what passes, scratch; and beside the allocator."""
    stages, peak = entry.stages, entry.peak
    place, row = stages.where()
    lines = [
        Line(
            id=line_id("held", alive.category, alive.name),
            amount=alive.amount,
            unit="B",
            basis="calibrated" if alive.kind == "workspace" else "modelled",
            formula=f"{alive.kind} alive at the {peak.place}",
            pp_stage=peak.pp_stage,
        )
        for alive in alive_at(stages, place, row)
        if alive.kind != "states"
    ]
    lines += [
        Line(
            id=line_id("held", "beside", found.what),
            amount=found.amount,
            unit="B",
            basis=found.basis,
            formula=f"outside PyTorch's allocator; between {found.lower} and {found.upper} B",
            cites=(found.cite,),
            pp_stage=peak.pp_stage,
        )
        for found in beside(inventory, entry.own.plans)
    ]
    return lines


def _moved_lines(moved: tuple[Moved, ...], where: int, own: Shares) -> list[Line]:
    return [
        Line(
            id=line_id("moved", move.collective, move.what, move.group),
            amount=move.wire_bytes,
            unit="B",
            basis="modelled",
            formula=f"{move.count} calls over {move.ranks} ranks, in {move.in_bytes} B, out {move.out_bytes} B; ring",
            cites=move.cites,
            pp_stage=int(own.pp_stage[0, where]),
        )
        for move in moved
    ]
