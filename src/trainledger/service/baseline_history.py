"""`baseline history`: what the run book has."""

from __future__ import annotations

from typing import Annotated

import msgspec

from trainledger.records.compare import peak_bytes
from trainledger.records.record import Baseline, Machine, Scaling
from trainledger.records.scaling import scaled
from trainledger.service.baseline_book import all_of, book_path
from trainledger.service.baseline_request import BookRequest
from trainledger.service.requests import INPUT, flag


class Request(BookRequest, frozen=True, kw_only=True, rename="kebab"):
    """The records of the run book, the oldest first."""

    name: Annotated[str | None, flag("Those of one name, or of one number.", "NAME", group=INPUT, positional=True)] = (
        None
    )


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One number of ranks of a record; the steps behind it are in `baseline export`."""

    ranks: int
    tokens_per_s: float
    step_s: float
    steps: int
    efficiency: float
    peak_bytes: int
    proven: bool


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One record."""

    number: int
    name: str
    made_at: str
    model: str
    layout: str
    scaling: Scaling
    version: str
    machine: Machine
    rungs: tuple[Result, ...]


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """What the book has."""

    book: str
    records: tuple[Record, ...]

    @property
    def exit_code(self) -> int:
        """A list is an answer."""
        return 0


def run(request: Request) -> Response:
    """Read the book."""
    records = tuple(map(_record, all_of(request.book, request.name, brief=True)))
    return Response(book=str(book_path(request.book)), records=records)


def _record(made: Baseline) -> Record:
    rungs = tuple(
        Result(
            ranks=of.ranks,
            tokens_per_s=found.tokens_per_s,
            step_s=found.step_s,
            steps=len(of.steps),
            efficiency=found.efficiency,
            peak_bytes=peak_bytes(of),
            proven=of.proven,
        )
        for of, found in zip(made.rungs, scaled(made), strict=True)
    )
    head = {name: getattr(made, name) for name in Record.__struct_fields__ if name != "rungs"}
    return Record(**head, rungs=rungs)
