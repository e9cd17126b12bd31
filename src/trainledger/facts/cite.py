"""Facts with their provenance, as a reader sees them: one line of text, or rows for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from trainledger.facts.load import Fact, Value


class FactRow(TypedDict):
    """One fact as JSON: `value` in base units, `text` as its file writes it."""

    key: str
    value: Value
    text: str
    basis: str
    source: str
    date: str
    note: str


def cite(fact: Fact) -> str:
    """Where a value comes from, on one line.

    >>> cite(Fact(value=3.35e12, basis="datasheet", source="example.org/h100", date="2026-08-22", note="HBM3"))
    'datasheet, example.org/h100, 2026-08-22 (HBM3)'
    """
    parts = ", ".join(part for part in (fact.basis, fact.source, fact.date) if part)
    return f"{parts} ({fact.note})" if fact.note else parts


def rows(facts: Mapping[str, Fact]) -> list[FactRow]:
    """Every fact in the order of its file, with all of its provenance."""
    return [
        FactRow(
            key=key,
            value=fact.value,
            text=fact.text,
            basis=fact.basis,
            source=fact.source,
            date=fact.date,
            note=fact.note,
        )
        for key, fact in facts.items()
    ]
