"""`baseline export` as text."""

from __future__ import annotations

from trainledger.report.document import Document, Text
from trainledger.report.words import Answer, whole


def document(answer: Answer) -> Document:
    """What was written."""
    return [
        Text(f"{whole(answer['records'])} records with {whole(answer['steps'])} steps are in {answer['out']}", "good")
    ]
