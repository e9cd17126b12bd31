"""`baseline import` as text."""

from __future__ import annotations

from trainledger.report.document import Document, Text
from trainledger.report.words import Answer, whole


def document(answer: Answer) -> Document:
    """What was put in, under which numbers."""
    put = [Text(f"{one['name']} of {one['made_at']} is number {one['number']}") for one in answer["records"]]
    known = f"; {whole(answer['known'])} were there" if answer["known"] else ""
    return [*put, Text(f"{whole(len(put))} records were put into {answer['book']}{known}", "good")]
