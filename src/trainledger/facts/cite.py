"""The text behind the keys that lines and docstrings cite: `data/references.toml`."""

from __future__ import annotations

import functools
from typing import Any

from trainledger.facts.load import DATA, load_toml


@functools.cache
def references() -> dict[str, dict[str, Any]]:
    """Key -> its title, where to read it, and a note where there is one."""
    return load_toml(DATA / "references.toml")


def reference(key: str) -> str:
    """What a cited key stands for, on one line; the place after a colon in it is the citation's own.

    >>> reference("zero-paper: section 3.1").partition(",")[0]
    'Rajbhandari et al. 2020'
    """
    return ", ".join(map(str, references()[key.partition(":")[0]].values()))
