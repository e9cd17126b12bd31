"""Facts of the outside world from TOML: each a value with its provenance, and nothing that no schema asks for.

A fact is a table, written on one line or as a section of its own:

    bandwidth = { value = "3.35 TB/s", basis = "datasheet", source = "https://...", checked = 2026-08-22, note = "" }

`source` is the page, repository file or log that states the value; `checked` is the day it was read, or its own
date where it was read by someone else. `value = false` says that the hardware lacks the thing; a fact that no
source states is left out, and asking for it raises MissingFact with file and key.
"""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from trainledger.errors import BadInput, MissingFact
from trainledger.units import Dimension, parse_quantity

DATA = Path(__file__).parent.parent / "data"

Basis = Literal["datasheet", "device log", "measured", "derived", "catalog", "published", "log", "assumed", "web page"]
BASES: tuple[str, ...] = get_args(Basis)

COUNT_LIMIT = 1 << 20
"""Nothing that is counted here, devices or their units, comes in larger numbers."""
Kind = Dimension | Literal["count", "text"]
Value = int | float | str | bool


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """One value in base units, and where it comes from.

    value   bytes and counts as int, other quantities as float, words as str; False where the hardware lacks it
    text    the value as the file writes it ("3.35 TB/s"), or "" where code derived it
    basis   what kind of source: BASES
    date    the day the source was read, or its own date, ISO; "" where the file gives none
    """

    value: Value
    basis: str
    source: str
    date: str = ""
    note: str = ""
    text: str = ""


class Slot(msgspec.Struct, frozen=True):
    """What a schema says of one key: its kind, and whether `value = false` (the hardware lacks it) may stand."""

    kind: Kind
    may_lack: bool = False


Schema = Mapping[str, Slot]
"""Dotted key ("memory.bandwidth") -> what may stand there."""


def display(path: Path) -> str:
    """How messages name a file: from `data/` on for the package's own, else as given."""
    return str(path.relative_to(DATA.parent)) if path.is_relative_to(DATA) else str(path)


def load_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; a file that is missing, not UTF-8, or not TOML (duplicate keys too) is refused."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise BadInput(f"{display(path)}: there is no such file; check the path") from None
    except OSError as error:
        raise BadInput(f"{display(path)}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInput(f"{display(path)}: is not UTF-8 text; save it as UTF-8") from None
    except (ValueError, RecursionError) as error:
        # a number of more digits than Python reads is a ValueError, as all else that is not TOML
        raise BadInput(f"{display(path)}: is not valid TOML: {error}") from None


def missing(where: str, key: str, knob: str) -> MissingFact:
    """The error for a fact that was asked for and that no source states."""
    return MissingFact(f"{where} has no {key}: no source that was opened states it; {knob}")


def read_text(where: str, table: Mapping[str, Any], key: str, default: str | None = None) -> str:
    """A string at `key`, not blank; `default` where the key is absent (None: it must be there)."""
    value = table.get(key, default)
    if value is None:
        raise BadInput(f'{where} has no {key}: add {key} = "..."')
    if not isinstance(value, str) or (default is None and not value.strip()):
        raise BadInput(f"{where}: {key} is {value!r}: write a string in quotes")
    return value


def refuse_unknown(where: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """A key that no schema knows is refused, never ignored."""
    for key in given:
        if key not in known:
            raise BadInput(f"{where}: {key} is not a known key; known: {', '.join(known)}")


def _value(where: str, raw: object, slot: Slot) -> Value:
    """The value of a fact, in base units."""
    if raw is False and slot.may_lack:
        return False
    if slot.kind == "count":
        if isinstance(raw, bool) or not isinstance(raw, int) or not 1 <= raw <= COUNT_LIMIT:
            raise BadInput(f"{where}.value is {raw!r}: write a whole number between 1 and {COUNT_LIMIT}")
        return raw
    if not isinstance(raw, str) or not raw.strip():
        lack = ", or false where the hardware lacks it" if slot.may_lack else ""
        raise BadInput(f"{where}.value is {raw!r}: write a string in quotes{lack}")
    if slot.kind == "text":
        return raw
    try:
        value = parse_quantity(raw, slot.kind)
    except BadInput as error:
        raise BadInput(f"{where}.value: {error}") from None
    if value == 0:
        raise BadInput(f"{where}.value is {raw!r}: it must be above zero; leave the fact out if it is not known")
    return value


def read_fact(where: str, raw: object, slot: Slot) -> Fact:
    """A fact from its table; `where` is file and key, as the messages begin."""
    if not isinstance(raw, dict):
        raise BadInput(f'{where} is {raw!r}: write {{ value = ..., basis = "...", source = "..." }}')
    refuse_unknown(where, raw, ("value", "basis", "source", "checked", "note"))
    if "value" not in raw:
        raise BadInput(f"{where} has no value: add value = ...")
    basis = read_text(where, raw, "basis")
    if basis not in BASES:
        raise BadInput(f"{where}.basis is {basis!r}: write one of {', '.join(BASES)}")
    checked = raw.get("checked")
    if checked is not None and type(checked) is not datetime.date:
        raise BadInput(f"{where}.checked is {checked!r}: write a date without quotes, such as 2026-08-22")
    value = raw["value"]
    return Fact(
        value=_value(where, value, slot),
        basis=basis,
        source=read_text(where, raw, "source"),
        date=checked.isoformat() if checked else "",
        note=read_text(where, raw, "note", ""),
        text="none" if value is False else str(value),
    )


def read_facts(where: str, tables: Mapping[str, Any], schema: Schema) -> dict[str, Fact]:
    """Every fact of a file by dotted key; a section or key that the schema lacks is refused."""
    sections = tuple(dict.fromkeys(key.partition(".")[0] for key in schema))
    facts: dict[str, Fact] = {}
    for section, table in tables.items():
        if section in schema:
            facts[section] = read_fact(f"{where}: {section}", table, schema[section])
            continue
        refuse_unknown(where, {section: table}, sections)
        if not isinstance(table, dict):
            raise BadInput(f"{where}: {section} is {table!r}: write it as a section [{section}] of facts")
        known = tuple(key.partition(".")[2] for key in schema if key.startswith(f"{section}."))
        refuse_unknown(f"{where}: [{section}]", table, known)
        for key, raw in table.items():
            facts[f"{section}.{key}"] = read_fact(f"{where}: {section}.{key}", raw, schema[f"{section}.{key}"])
    return facts
