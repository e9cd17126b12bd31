"""`score`: the predictions of a table's rows, graded against what was measured or printed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from trainledger.service.requests import ANSWER, INPUT, flag


class Request(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """The predictions for a table of runs, graded against its outcome columns."""

    csv: Annotated[str, flag("A table of runs or of printed figures.", "CSV", group=INPUT, positional=True)]
    what: Annotated[str, flag("What to grade: states or memory.", "WHAT", group=ANSWER)] = "states"


class Response(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Every row with its grade, then counts by source and over all."""

    what: str
    rows: list[dict[str, Any]]
    sources: dict[str, dict[str, Any]]
    overall: dict[str, Any]
    ignored_columns: list[str] = []

    @property
    def exit_code(self) -> int:
        """A grade is an answer, whatever it is."""
        return 0


def run(request: Request) -> Response:
    """Grade every row."""
    from trainledger.scoring.score import score_csv

    return Response(**score_csv(Path(request.csv), request.what))
