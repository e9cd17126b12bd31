"""How far a run is, as whoever waits for it is told. No torch here."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""Called with how many are done, of how many, and of what: the steps of a run, or of all ranks of a dry run."""
