"""A Response on standard output: JSON, plain text in a pipe, colour at a terminal."""

from __future__ import annotations

import sys
from types import ModuleType

from trainledger.report import machine
from trainledger.report.document import Document
from trainledger.report.plain import render


def show(response: object, report: ModuleType, *, as_json: bool) -> None:
    """Write an answer."""
    if as_json:
        sys.stdout.write(machine.encode(response))
        sys.stdout.flush()
    else:
        write(report.document(machine.answer(response)))


def write(document: Document) -> None:
    """Write a document and flush it, so that a closed pipe is noticed here."""
    if sys.stdout.isatty():
        from trainledger.report.terminal import draw

        draw(document, sys.stdout)
    else:
        sys.stdout.write(render(document))
    sys.stdout.flush()
