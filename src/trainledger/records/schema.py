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
    said = ("name", "made_at", "model", "layout", "scaling", "version", "machine")
    db.table("baseline").create({"number": int, **dict.fromkeys(said, str)}, pk="number", not_null=set(said))
    db.table("baseline").create_index(["name"])
    counts = ("ranks", "tokens", "flop", "calls", "wire_bytes", "reference_wire_bytes")
    beyond = ("unexplained_bytes", "unexplained_calls")
    db.table("rung").create(
        {"id": int, "baseline": int, "spec": str, **dict.fromkeys((*counts, *beyond), int)},
        pk="id",
        foreign_keys=[("baseline", "baseline", "number")],
    )
    words, figures = ("id", "instant", "unit", "basis", "verdict"), ("rank", "predicted", "measured")
    _under_rung(db, "line", {"position": int}, {**dict.fromkeys(words, str), **dict.fromkeys(figures, int)})
    times = ("seconds", "reference_work_s", "reference_call_s", "reference_sum_s")
    _under_rung(db, "step", {"round": int, "step": int}, dict.fromkeys(times, float))
    _under_rung(db, "rank", {"rank": int}, {"allocator_peak_bytes": int})


def _under_rung(db: Database, table: str, key: dict[str, type], columns: dict[str, type]) -> None:
    """A table with rows of each rung."""
    db.table(table).create({"rung": int, **key, **columns}, pk=("rung", *key), foreign_keys=[("rung", "rung", "id")])


MIGRATIONS: tuple[Callable[[Database], None], ...] = (_records,)
"""In order; each is done whole or not at all, and none is changed once it was released."""
