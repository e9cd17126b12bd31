"""One plan in full: every line it holds and moves, on the pipeline stage that holds most."""

from __future__ import annotations

import dataclasses
from functools import cached_property

import msgspec
import numpy as np

from trainledger.account.held import beside_lines, peak_lines, state_lines
from trainledger.account.memory import StageMemory, stage_memory
from trainledger.account.peak import Peak, peak_of
from trainledger.account.shares import Shares, shares
from trainledger.account.traffic import all_traffic
from trainledger.account.traffic.collectives import Collective
from trainledger.inventory.inventory import Inventory
from trainledger.lines import Line, line_id
from trainledger.plans.plan import Plans


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
        plans = self.own.plans
        return (
            *state_lines(self.inventory, self.own, self.where, self.peak),
            *peak_lines(self.inventory, plans, self.stages),
            *beside_lines(self.inventory, plans, self.peak.pp_stage),
            *_moved_lines(self.traffic, self.where, self.own),
        )


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
