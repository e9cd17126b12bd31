"""`list` as text: one table for every kind of item."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainledger.report.document import BLANK, Column, Document, Table, Text, left, table
from trainledger.report.words import Answer
from trainledger.units import format_bytes, format_flops, format_gb, format_rate

PER_LINE = 3
"""Aliases shown; the JSON has all."""

TITLES = {
    "usable_bytes": "usable",
    "nominal_bytes": "name plate",
    "bf16_flop_per_s": "bf16 peak",
    "memory_bytes_per_s": "memory rate",
}
NUMBERS = (*TITLES, "gpus_per_node", "scale_up_domain")


def document(answer: Answer) -> Document:
    """The items, or all that is known of one."""
    if "name" not in answer:
        return [_items(answer["items"])]
    if answer.get("items"):
        return [Text(answer["name"], "answer"), _items([_without(item, "name") for item in answer["items"]])]
    about = {key: value for key, value in answer.get("about", {}).items() if not _nested(value)}
    width = max(map(len, about), default=0)
    tables = [part for part in answer.get("about", {}).items() if _nested(part[1])]
    return [
        Text(answer["name"], "answer"),
        *(Text(f"{key.ljust(width)}  {show(key, value)}") for key, value in about.items()),
        *(part for key, value in tables for part in (BLANK, Text(key, "heading"), _nested_table(value))),
        *([BLANK, _facts(answer["facts"])] if answer.get("facts") else []),
    ]


def _items(items: list[Mapping[str, Any]]) -> Table:
    keys = list(items[0]) if items else []
    columns = [Column(TITLES.get(key, key.replace("_", " ")), right=key in NUMBERS) for key in keys]
    return table(columns, [[show(key, item[key]) for key in keys] for item in items])


def show(key: str, value: object) -> str:
    """A value in words; the key's suffix is its unit."""
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        shown = ", ".join(map(str, value if key != "aliases" else value[:PER_LINE]))
        return f"{shown}, ..." if key == "aliases" and len(value) > PER_LINE else shown
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _number(key, value)
    return str(value)


def _number(key: str, value: float) -> str:
    if key == "nominal_bytes":
        return format_gb(value)
    if key.endswith("_flop_per_s"):
        return format_flops(value)
    if key.endswith("_bytes_per_s"):
        return format_rate(value)
    return format_bytes(value) if key.endswith("_bytes") else str(value)


def _nested(value: object) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list | tuple) and any(isinstance(item, dict) for item in value)
    )


def _nested_table(value: dict[str, Any] | list[dict[str, Any]]) -> Table:
    rows = [{"name": key, **_as_row(entry)} for key, entry in value.items()] if isinstance(value, dict) else value
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[show(key, row[key]) if row.get(key) not in (None, "", [], ()) else "" for key in keys] for row in rows]
    return table([left(key.replace("_", " ")) for key in keys], cells)


def _as_row(entry: object) -> dict[str, Any]:
    return entry if isinstance(entry, dict) else {"value": entry}


def _without(item: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name != key}


def _facts(facts: list[Answer]) -> Table:
    rows = [
        [
            fact["key"],
            fact["text"] or show(fact["key"], fact["value"]),
            fact["basis"],
            fact["date"],
            fact["source"],
            fact["note"],
        ]
        for fact in facts
    ]
    return table([left("fact"), left("value"), left("basis"), left("checked"), left("source"), left("note")], rows)
