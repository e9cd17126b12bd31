"""`baseline export`: records as JSON, which `import` and --book read again, or their steps as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from io import BufferedWriter
from pathlib import Path
from typing import Annotated

import msgspec

from trainledger.errors import BadInput, UsageError
from trainledger.records.record import Baseline, Step
from trainledger.service.baseline_book import EXPORTED, Exported, all_of
from trainledger.service.baseline_request import BookRequest
from trainledger.service.requests import INPUT, flag

TABLE = ".csv"
COLUMNS = ("number", "name", "made_at", "model", "layout", "scaling", "ranks", "tokens", *Step.__struct_fields__)


class Request(BookRequest, frozen=True, kw_only=True, rename="kebab"):
    """Write records into a file: all that is known of them as .json, every step on the clock as a row of .csv."""

    out: Annotated[
        str, flag("The file: .json or .csv; one that is there is not touched.", "OUT", group=INPUT, positional=True)
    ]
    name: Annotated[
        str | None, flag("Records of one name, or of one number [all].", "NAME", group=INPUT, positional=True)
    ] = None


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """What was written."""

    out: str
    records: int
    steps: int

    @property
    def exit_code(self) -> int:
        """It was written."""
        return 0


def run(request: Request) -> Response:
    """Write the file."""
    out = Path(request.out)
    if out.suffix not in (EXPORTED, TABLE):
        raise UsageError(f"{request.out} ends neither in {EXPORTED} nor in {TABLE}; the ending says what is written")
    made = all_of(request.book, request.name)
    content = msgspec.json.encode(Exported(baselines=made)) if out.suffix == EXPORTED else table(made).encode()
    try:
        with out.open("xb") as file:
            _fill(file, content)
    except FileExistsError:
        raise BadInput(f"{request.out} is there already, and is left as it is; name another file") from None
    except OSError as error:
        raise BadInput(f"{request.out} cannot be written: {error.strerror}; make room, or name another file") from None
    steps = sum(len(rung.steps) for one in made for rung in one.rungs)
    return Response(out=request.out, records=len(made), steps=steps)


def _fill(file: BufferedWriter, content: bytes) -> None:
    """Write all of a new file; where that fails there is none, so that its name can be taken again."""
    try:
        file.write(content)
        file.flush()
    except OSError:
        Path(file.name).unlink(missing_ok=True)
        raise


def table(made: Sequence[Baseline]) -> str:
    """Every step as a row."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(_rows(made))
    return text.getvalue()


def _rows(made: Sequence[Baseline]) -> Iterator[tuple[object, ...]]:
    for one in made:
        head = (one.number, one.name, one.made_at, one.model, one.layout, one.scaling)
        for rung in one.rungs:
            for step in rung.steps:
                yield (*head, rung.ranks, rung.tokens, *msgspec.structs.astuple(step))
