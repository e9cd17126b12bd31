"""What a report says, before it is drawn: lines of text and tables, each with a style that a terminal may colour."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec

Style = Literal["", "answer", "good", "bad", "warn", "dim", "heading", "title"]
Cell = str


class Text(msgspec.Struct, frozen=True):
    """One line."""

    text: str
    style: Style = ""


class Column(msgspec.Struct, frozen=True):
    """A column of a table; numbers stand to the right."""

    title: str
    right: bool = True


class Table(msgspec.Struct, frozen=True):
    """Rows of equal length; `styles` names the style of each row, and may be empty."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    styles: tuple[Style, ...] = ()


Part: TypeAlias = Text | Table
Document: TypeAlias = list[Part]


def left(title: str) -> Column:
    """A column of words."""
    return Column(title, right=False)


def table(columns: Sequence[Column], rows: Iterable[Sequence[Cell]], styles: Sequence[Style] = ()) -> Table:
    """A table of the columns that say something: one in which every cell is empty is left out.

    >>> table([left("a"), Column("b")], [["x", ""], ["y", ""]]).columns
    (Column(title='a', right=False),)
    """
    kept = [tuple(row) for row in rows]
    shown = [index for index in range(len(columns)) if any(row[index] for row in kept)] or list(range(len(columns)))
    return Table(
        columns=tuple(columns[index] for index in shown),
        rows=tuple(tuple(row[index] for index in shown) for row in kept),
        styles=tuple(styles),
    )


BLANK = Text("")
