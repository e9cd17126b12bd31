"""A line of what a run holds outside of its steady step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from trainledger.lines import BASES, Basis, Line, line_id
from trainledger.plans.plan import Plans
from trainledger.plans.setting import NODE_GPUS, Setting

When = Literal["load", "first step", "all the time", "save"]


class Outside(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of device or host memory, or on the disk that a run saves to.

    when     what happens then; all the time: host memory, which no meter of the card shows
    per      of one rank, that which holds most; of all ranks of one node; or of the whole job
    amount   while a run loads or steps first, all that is told of that memory; while it saves, what comes on top
    """

    what: str
    when: When
    place: Literal["device", "host", "disk"]
    per: Literal["rank", "node", "job"]
    amount: int
    basis: Basis
    formula: str
    cites: tuple[str, ...]

    @property
    def line(self) -> Line:
        """The same as a line of the ledger."""
        return Line(
            id=line_id("held", "outside", self.what, "" if self.place == "device" else self.place),
            amount=self.amount,
            unit="B",
            basis=self.basis,
            formula=f"{self.when}, of one {self.per}: {self.formula}",
            cites=self.cites,
        )


def ranks_of_node(setting: Setting, plans: Plans) -> int:
    """Ranks of a single plan on one node: its cards, or what launchers start where no cluster is named."""
    node = setting.cluster.gpus_per_node if setting.cluster is not None else NODE_GPUS
    return min(node, int(plans.gpus[0]))


def on_node(setting: Setting, bases: Sequence[Basis]) -> Basis:
    """How sure a sum over the ranks of a node is; without a cluster it is assumed how many there are."""
    return least_sure([*bases, *(["assumed"] if setting.cluster is None else [])])


def least_sure(bases: Sequence[Basis]) -> Basis:
    """The least sure of some."""
    return max(bases, key=BASES.index)
