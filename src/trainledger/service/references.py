"""The text behind the keys that lines cite."""

from __future__ import annotations

import functools
from typing import Any

from trainledger.facts.load import DATA, load_toml


@functools.cache
def _file() -> dict[str, Any]:
    path = DATA / "references.toml"
    return load_toml(path) if path.is_file() else {}


def reference(key: str) -> str:
    """Where a cited key comes from, on one line; "" where the list does not have it."""
    entry = _file().get(key.partition(":")[0], "")
    if isinstance(entry, dict):
        return ", ".join(str(part) for part in entry.values())
    return str(entry)
