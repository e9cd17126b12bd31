"""What a file of an engine's or launcher's own settings says of a plan: each key is used, or named as not used."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import msgspec

from trainledger.checklist.check import Evidence
from trainledger.errors import BadInput
from trainledger.rules.rule import Severity

AUTO = "auto"
"""What DeepSpeed's file says where a trainer is to fill in its own argument."""


class Used(msgspec.Struct, frozen=True, kw_only=True):
    """A key that the plan has its value from; `flag` is what one would have typed."""

    key: str
    value: str
    flag: str


class Unused(msgspec.Struct, frozen=True, kw_only=True):
    """A key that changes nothing of the answer, and why."""

    key: str
    value: str
    why: str


class Conflict(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that the settings themselves break, whatever the plan."""

    id: str
    severity: Severity
    message: str
    knob: str
    evidence: tuple[Evidence, ...] = ()
    source: str


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """A file of settings as it was read.

    plan   fields of a plan, by flag's name with underscores
    told   what is told beside a plan: learning_rate, initial_scale, loss_scaling
    """

    path: str
    kind: str
    plan: dict[str, Any]
    told: dict[str, float | bool]
    used: tuple[Used, ...]
    unused: tuple[Unused, ...]
    conflicts: tuple[Conflict, ...]


class Values(msgspec.Struct, frozen=True):
    """The values of a file by dotted key; a value of another type than asked for is refused by file and key."""

    where: str
    flat: Mapping[str, Any]

    def has(self, key: str) -> bool:
        """Whether the file says anything but null."""
        return self.flat.get(key) is not None

    def auto(self, key: str) -> bool:
        """Whether it is left to the trainer."""
        return self.flat.get(key) == AUTO

    def whole(self, key: str, *, least: int = 0) -> int | None:
        """A whole number, which JSON may write as 5e8; None where it is absent or auto."""
        value = self._of(key)
        if value is None:
            return None
        number = _finite(value)
        if number is None or number != int(number) or number < least:
            raise self.wrong(key, f"a whole number of at least {least}, without quotes")
        return int(number)

    def number(self, key: str) -> float | None:
        """A number; None where it is absent or auto."""
        value = self._of(key)
        if value is None:
            return None
        number = _finite(value)
        if number is None:
            raise self.wrong(key, "a number, without quotes")
        return float(number)

    def switch(self, key: str) -> bool | None:
        """True or false; None where it is absent or auto."""
        value = self._of(key)
        if value is None or isinstance(value, bool):
            return value
        raise self.wrong(key, "true or false, without quotes")

    def word(self, key: str, choices: Iterable[str] = ()) -> str | None:
        """A text, of the choices where there are any; None where it is absent or auto."""
        value = self._of(key)
        if value is None:
            return None
        known = tuple(choices)
        if not isinstance(value, str) or (known and value.lower() not in known):
            raise self.wrong(key, " or ".join(known) if known else "a text in quotes")
        return value.lower() if known else value

    def shown(self, key: str) -> str:
        """The value as the file writes it."""
        return shown(self.flat[key])

    def wrong(self, key: str, fits: str) -> BadInput:
        """The error for a value of a kind that the key does not take."""
        return BadInput(f"{self.where}: {key} is {self.shown(key)}: write {fits}")

    def _of(self, key: str) -> object:
        value = self.flat.get(key)
        return None if value == AUTO else value


def _finite(value: object) -> int | float | None:
    """A number that is one; None for all else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def shown(value: object) -> str:
    """A value as JSON has it, cut where it is long.

    >>> shown(5e8), shown("auto"), shown(0.5)
    ('500000000', '"auto"', '0.5')
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def flattened(tables: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Values by dotted key; lists are values.

    >>> flattened({"a": {"b": 1, "c": {"d": [2]}}, "e": {}})
    {'a.b': 1, 'a.c.d': [2], 'e': {}}
    """
    out: dict[str, Any] = {}
    for key, value in tables.items():
        name = f"{above}{key}"
        if isinstance(value, dict) and value:
            out |= flattened(cast("dict[str, Any]", value), f"{name}.")
        else:
            out[name] = value
    return out


def nearest(key: str, known: Iterable[str]) -> str:
    """Where a known key is written much like it, what names that key; else nothing."""
    near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.8)
    return f", nearest: {near[0]}" if near else ""
