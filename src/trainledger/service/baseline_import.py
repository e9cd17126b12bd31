"""`baseline import`: records that `baseline export` wrote, or that a run could not keep, into a run book."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from trainledger.records.record import Baseline
from trainledger.service.baseline_book import book, book_path, exported
from trainledger.service.baseline_request import BookRequest
from trainledger.service.requests import INPUT, flag


class Request(BookRequest, frozen=True, kw_only=True, rename="kebab"):
    """Put exported records into a run book, under new numbers; one that the book has already is not put in twice."""

    file: Annotated[str, flag("What `baseline export` wrote as .json.", "FILE", group=INPUT, positional=True)]


class Put(msgspec.Struct, frozen=True, kw_only=True):
    """A record that was put in, under its new number."""

    number: int
    name: str
    made_at: str


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """What was put in; `known` are those that the book had."""

    book: str
    records: tuple[Put, ...]
    known: int

    @property
    def exit_code(self) -> int:
        """They are in the book."""
        return 0


def run(request: Request) -> Response:
    """Write them one by one; each is in the book whole before the next."""
    made = exported(Path(request.file))
    put: list[Put] = []
    with book(request.book, create=True) as db:
        from trainledger.records.store import every, write

        known = {_content(one) for one in every(db)}
        for one in made:
            if _content(one) not in known:
                kept = write(db, one)
                put.append(Put(number=kept.number, name=kept.name, made_at=kept.made_at))
    return Response(book=str(book_path(request.book)), records=tuple(put), known=len(made) - len(put))


def _content(made: Baseline) -> bytes:
    """All of a record but its number, to tell whether two are one."""
    return msgspec.json.encode(msgspec.structs.replace(made, number=0), order="sorted")
