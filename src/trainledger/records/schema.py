"""The tables of the run book, version by version. `PRAGMA user_version` says how many of MIGRATIONS a file has had."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlite_utils import Database

APPLICATION = 0x74724C62
"""`PRAGMA application_id` of a run book ("trLb"): how it is told from another program's database."""


def _records(db: Database) -> None:
    """A baseline, its rungs, and under each rung its lines, its steps and its ranks."""
    db.table("baseline").create(
        {
            "number": int,
            "name": str,
            "made_at": str,
            "model": str,
            "layout": str,
            "scaling": str,
            "version": str,
            "machine": str,
        },
        pk="number",
        not_null={"name", "made_at", "model", "layout", "scaling", "version", "machine"},
    )
    db.table("baseline").create_index(["name"])
    db.table("rung").create(
        {
            "id": int,
            "baseline": int,
            "ranks": int,
            "spec": str,
            "tokens": int,
            "flop": int,
            "calls": int,
            "wire_bytes": int,
            "reference_wire_bytes": int,
            "unexplained_bytes": int,
            "unexplained_calls": int,
        },
        pk="id",
        foreign_keys=[("baseline", "baseline", "number")],
    )
    db.table("line").create(
        {
            "rung": int,
            "position": int,
            "rank": int,
            "id": str,
            "instant": str,
            "unit": str,
            "basis": str,
            "predicted": int,
            "measured": int,
            "verdict": str,
        },
        pk=("rung", "position"),
        foreign_keys=[("rung", "rung", "id")],
    )
    db.table("step").create(
        {
            "rung": int,
            "round": int,
            "step": int,
            "seconds": float,
            "reference_work_s": float,
            "reference_call_s": float,
            "reference_sum_s": float,
        },
        pk=("rung", "round", "step"),
        foreign_keys=[("rung", "rung", "id")],
    )
    db.table("rank").create(
        {"rung": int, "rank": int, "allocator_peak_bytes": int},
        pk=("rung", "rank"),
        foreign_keys=[("rung", "rung", "id")],
    )


MIGRATIONS: tuple[Callable[[Database], None], ...] = (_records,)
"""In order; each is done whole or not at all, and none is changed once it was released."""
