"""Which engine at which release a measured run is read as, and what holds where its row is silent.

The readings are data/measured/engines.toml; a row is known by its system and its date, never by who measured it.
"""

from __future__ import annotations

import re
from calendar import monthrange
from functools import lru_cache

import msgspec

from trainledger.errors import BadInput
from trainledger.facts.load import load_toml
from trainledger.profiles import load_profile
from trainledger.scoring.cells import Cells
from trainledger.scoring.prediction import Unsupported
from trainledger.scoring.table import MEASURED
from trainledger.scoring.words import Unclear

_DATE = re.compile(r"\b(20[0-9]{2})(?:-([01][0-9]))?(?:-([0-3][0-9]))?\b")


class EngineReading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of engines.toml; its keys are explained there."""

    system: tuple[str, ...]
    unless: tuple[str, ...] = ()
    since: str = ""
    before: str = ""
    engine: str = ""
    framework_version: str = ""
    by_date: bool = False
    version: tuple[str, ...] = ()
    unsupported: str = ""
    reason: str = ""
    cite: str = ""
    recompute: str = ""
    fp8: str = ""
    zero_stage: int | None = None
    sequence_parallel: bool | None = None
    attention: str = ""
    pp_microbatches: str = ""
    loss: str = ""
    plain: str = ""

    def speaks_of(self, system: str) -> bool:
        """Whether a system, in lower case, is one of these."""
        return _holds(system, self.system) and not _holds(system, self.unless)

    def holds_at(self, date: str) -> bool:
        """Whether a date lies within the bounds; no date lies within none."""
        if not date:
            return not self.since and not self.before
        return (not self.since or self.since <= date) and (not self.before or date < self.before)


class EngineReadings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of engines.toml."""

    engine: tuple[EngineReading, ...]


@lru_cache(maxsize=1)
def engine_readings() -> EngineReadings:
    """How the engine of a run is read."""
    return msgspec.convert(load_toml(MEASURED / "engines.toml"), EngineReadings)


def engine_of(cells: Cells) -> EngineReading:
    """The reading of a row's system at its date; Unclear where it names none, Unsupported where no account has it.

    >>> engine_of(Cells({"system": "torchtitan+torchao", "source_date": "2025-08"})).engine
    'torchtitan'
    """
    system, date = cells.words("system"), date_of(cells.text("source_date"))
    if not system:
        raise Unclear("system is blank: it says which engine ran")
    known = engine_readings().engine
    named = [reading for reading in known if reading.speaks_of(system)]
    if not named:
        words = ", ".join(dict.fromkeys(word for reading in known if reading.engine for word in reading.system))
        raise Unsupported(f"system {cells.text('system')!r} is no engine that is read; words that are: {words}")
    found = next((reading for reading in named if reading.holds_at(date)), named[-1])
    if found.unsupported:
        raise Unsupported(f"system {cells.text('system')!r}: {found.unsupported}")
    return msgspec.structs.replace(found, framework_version=_release(cells, found, date))


def release_number(cells: Cells, reading: EngineReading) -> str:
    """The engine's release as the row numbers it, "" where it does not.

    >>> titan = engine_of(Cells({"system": "deepspeed"}))
    >>> release_number(Cells({"framework_version": "DeepSpeed 0.16.4, PyTorch 2.6.0"}), titan)
    '0.16.4'
    """
    words = "|".join(re.escape(word) for word in reading.version)
    found = re.search(rf"(?<![a-z0-9])(?:{words})[ -]?[vr]?([0-9]+(?:\.[0-9]+)+)", cells.words("framework_version"))
    return found[1] if words and found else ""


def unread_release(cells: Cells, reading: EngineReading) -> str:
    """What to say of a row whose engine is at a release that no profile covers; "" where one does, or none is named."""
    named = release_number(cells, reading) or (date_of(cells.text("source_date")) if reading.by_date else "")
    if not named or _is_read(reading.engine, named):
        return ""
    read = load_profile(reading.engine, reading.framework_version).framework_version
    return f"{reading.engine} {named} was not read: as at {read}"


def _release(cells: Cells, reading: EngineReading, date: str) -> str:
    """The release by its number, else by the row's date, else the one that the reading names."""
    for named in (release_number(cells, reading), date if reading.by_date else ""):
        if named and _is_read(reading.engine, named):
            return named
    return reading.framework_version


def _is_read(engine: str, release: str) -> bool:
    try:
        load_profile(engine, release)
    except BadInput:
        return False
    return True


def date_of(text: str) -> str:
    """The first date that a cell states, to the day; of a year or a month its end, of no date "".

    What is published in a month was run by the end of it at the latest, so by the newest code of it.

    >>> date_of("2024-12"), date_of("2024-2026"), date_of("last week")
    ('2024-12-31', '2024-12-31', '')
    """
    match = _DATE.search(text)
    if not match:
        return ""
    year, month = match[1], match[2] or "12"
    last = monthrange(int(year), int(month))[1] if 1 <= int(month) <= 12 else 31  # months of a year
    return f"{year}-{month}-{match[3] or last}"


def _holds(system: str, phrases: tuple[str, ...]) -> bool:
    return any(re.search(rf"(?<![a-z0-9]){re.escape(phrase)}(?![a-z0-9])", system) for phrase in phrases)
