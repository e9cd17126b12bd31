"""`checkpoint export` as text."""

from __future__ import annotations

from trainledger.report.document import Document, Text
from trainledger.report.words import Answer
from trainledger.units import format_bytes


def document(answer: Answer) -> Document:
    """What was written."""
    written = f"{len(answer['files'])} files of {format_bytes(answer['bytes'])}"
    return [Text(f"{written} from {answer['path']}", "good"), *(Text(file) for file in answer["files"])]
