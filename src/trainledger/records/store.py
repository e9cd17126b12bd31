"""Records into the tables of a run book, and out of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from trainledger.account.rank_memory import PEAK
from trainledger.errors import UnknownName
from trainledger.reconcile.verdict import WRONG, Verdict
from trainledger.records.book import transaction
from trainledger.records.record import Baseline, Machine, Rung, Step

if TYPE_CHECKING:
    from sqlite_utils import Database

HEAD = ("name", "made_at", "model", "layout", "scaling", "version")
MOST_DIGITS = 18
"""Of a number of SQLite's, 18 always fit."""
FIGURES = (
    "ranks",
    "tokens",
    "flop",
    "calls",
    "wire_bytes",
    "reference_wire_bytes",
    "unexplained_bytes",
    "unexplained_calls",
)
"""Columns that are fields of the same name."""


def write(db: Database, made: Baseline) -> Baseline:
    """Put a record into the book, in one transaction; the record with the number that it got."""
    with transaction(db):
        head = {name: getattr(made, name) for name in HEAD}
        number = _inserted(db, "baseline", {**head, "machine": _text(made.machine)})
        for rung in made.rungs:
            _write_rung(db, number, rung)
    return msgspec.structs.replace(made, number=number)


def _write_rung(db: Database, number: int, rung: Rung) -> None:
    figures = {name: getattr(rung, name) for name in FIGURES}
    of = _inserted(db, "rung", {"baseline": number, **figures, "spec": _text(rung.spec)})
    lines = ({"rung": of, "position": at, **_row(line)} for at, line in enumerate(rung.lines))
    db.table("line").insert_all(lines)
    db.table("step").insert_all({"rung": of, **_row(step)} for step in rung.steps)
    peaks = enumerate(rung.allocator_peak_bytes)
    db.table("rank").insert_all({"rung": of, "rank": rank, "allocator_peak_bytes": peak} for rank, peak in peaks)


def _inserted(db: Database, table: str, row: Mapping[str, object]) -> int:
    key = db.table(table).insert(dict(row)).last_pk
    assert isinstance(key, int)
    return key


def _row(of: msgspec.Struct) -> dict[str, Any]:
    return msgspec.structs.asdict(of)


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()


def read(db: Database, name: str) -> Baseline:
    """The newest record of a name, or the one of a number; an unknown name is refused with the nearest."""
    named = list(db.table("baseline").rows_where("name = ?", [name], order_by="number desc", limit=1))
    if not named and name.isdecimal() and len(name) < MOST_DIGITS:
        named = list(db.table("baseline").rows_where("number = ?", [int(name)]))
    if not named:
        names = {row["name"] for row in db.table("baseline").rows_where(select="name")}
        hint = "`trainledger baseline history` lists them"
        raise UnknownName("baseline", name, names, hint if names else "the book is empty: `trainledger baseline run`")
    return _baseline(db, named[0])


def every(db: Database, *, brief: bool = False) -> Iterator[Baseline]:
    """All records in the order in which they were made.

    brief   of the lines only peaks and those that are not as predicted, which are few
    """
    for row in list(db.table("baseline").rows_where(order_by="number")):
        yield _baseline(db, row, brief=brief)


def _baseline(db: Database, row: Mapping[str, Any], *, brief: bool = False) -> Baseline:
    rungs = list(db.table("rung").rows_where("baseline = ?", [row["number"]], order_by="ranks"))
    return Baseline(
        **{name: row[name] for name in HEAD},
        number=row["number"],
        machine=msgspec.json.decode(row["machine"], type=Machine),
        rungs=tuple(_rung(db, rung, brief=brief) for rung in rungs),
    )


def _rung(db: Database, row: Mapping[str, Any], *, brief: bool) -> Rung:
    def under(table: str, order: str, where: str = "", values: tuple[str, ...] = ()) -> Iterable[dict[str, Any]]:
        return db.table(table).rows_where(f"rung = ?{where}", [row["id"], *values], order_by=order)

    told = f" and (id = ? or verdict in ({', '.join('?' * len(WRONG))}))"
    lines = under("line", "position", told, (PEAK, *WRONG)) if brief else under("line", "position")

    return Rung(
        **{name: row[name] for name in FIGURES},
        spec=msgspec.json.decode(row["spec"]),
        allocator_peak_bytes=tuple(rank["allocator_peak_bytes"] for rank in under("rank", "rank")),
        lines=tuple(_without(Verdict, line) for line in lines),
        steps=tuple(_without(Step, step) for step in under("step", "round, step")),
    )


def _without(kind: Any, row: Mapping[str, Any]) -> Any:  # noqa: ANN401 - any of the Structs that have a table
    """The Struct of a row, whose keys of the table are no fields of it."""
    return msgspec.convert({name: row[name] for name in kind.__struct_fields__}, kind)
