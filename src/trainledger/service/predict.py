"""`predict`: a prediction for each row of a table, from the row's inputs alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from trainledger.service.requests import INPUT, flag


class Request(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """A prediction for each row of a table of runs, from its input columns alone."""

    csv: Annotated[str, flag("A table of runs or of printed figures.", "CSV", group=INPUT, positional=True)]


class Response(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Rows in the order of the table: id, status, reason, and what is predicted; columns that nobody read."""

    rows: list[dict[str, Any]]
    ignored_columns: list[str] = []

    @property
    def exit_code(self) -> int:
        """A row that cannot be predicted is an answer, not a failure."""
        return 0


def run(request: Request) -> Response:
    """Predict every row."""
    from trainledger.scoring.predict import predict_csv

    return Response(**predict_csv(Path(request.csv)))
