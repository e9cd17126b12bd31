"""An answer as JSON: the same bytes from the command line and from an HTTP API."""

from __future__ import annotations

from typing import Any

import msgspec


def answer(response: object) -> dict[str, Any]:
    """The answer as dictionaries, lists, strings and numbers: what reports read."""
    return msgspec.to_builtins(response)


def encode(response: object) -> str:
    """The answer as JSON text, two spaces deep, with a final newline."""
    return msgspec.json.format(msgspec.json.encode(response), indent=2).decode() + "\n"
