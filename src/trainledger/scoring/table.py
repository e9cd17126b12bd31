"""A CSV table as rows of inputs and outcomes: parsed here, so that a predictor never holds an outcome.

Which column is which stands in data/measured/tables.toml. Only the columns that inputs may hold numbers in are
checked here; an outcome is read, as text, by whoever grades.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from pathlib import Path

import msgspec

from trainledger.errors import BadInput
from trainledger.facts.load import DATA, load_toml

MEASURED = DATA / "measured"


class Columns(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the columns of one kind of table are: see data/measured/tables.toml."""

    mark: str
    what: str
    inputs: tuple[str, ...]
    outcomes: tuple[str, ...]
    whole: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    def is_outcome(self, column: str) -> bool:
        """Whether a column is hidden from the predictor; `check_*` is every column that begins so."""
        return any(
            column.startswith(name.removesuffix("*")) if name.endswith("*") else column == name
            for name in self.outcomes
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row: `inputs` is all that a predictor gets, `outcomes` all that it must not."""

    id: str
    line: int
    inputs: Mapping[str, str]
    outcomes: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows in the file's order. kind: a section of tables.toml; ignored: columns that it does not know."""

    kind: str
    where: str
    rows: tuple[Row, ...]
    ignored: tuple[str, ...]


@lru_cache(maxsize=1)
def table_kinds() -> dict[str, Columns]:
    """The kinds of table by name."""
    return msgspec.convert(load_toml(MEASURED / "tables.toml"), dict[str, Columns])


def load_table(path: str | Path) -> Table:
    """The table in a CSV file."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); check the path, and give a CSV file") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise BadInput(f"{path}, line {line}: not UTF-8 text; save the table as UTF-8 CSV") from None
    return parse_table(text, where=str(path))


def parse_table(text: str, *, where: str) -> Table:
    r"""The table in the text of a CSV file, every row kept, or BadInput with line and column.

    >>> table = parse_table("id,kind,dp,note\nA-1,figure,8,checked by hand\n", where="t.csv")
    >>> table.rows[0].inputs, table.rows[0].outcomes
    ({'kind': 'figure', 'dp': '8'}, {'note': 'checked by hand'})
    """
    records = _records(text, where)
    try:
        line, header = next(records)
    except StopIteration:
        raise BadInput(f"{where} is empty; give a CSV table whose first line names its columns") from None
    header = [name.strip() for name in header]
    kind = _kind(header, line, where)
    columns = table_kinds()[kind]
    rows: list[Row] = []
    seen: dict[str, int] = {}
    for line, cells in records:
        rows.append(_row(header, cells, columns, line, where))
        name = rows[-1].id
        if name in seen:
            raise BadInput(f"{where}, line {line}, column id: {name!r} stands on line {seen[name]} too; rename one")
        seen[name] = line
    if not rows:
        raise BadInput(f"{where} has column names and no row; add rows below line {line}")
    ignored = [name for name in header if name not in ("id", *columns.inputs) and not columns.is_outcome(name)]
    return Table(kind=kind, where=where, rows=tuple(rows), ignored=tuple(ignored))


def _records(text: str, where: str) -> Iterator[tuple[int, list[str]]]:
    """(first line, cells) of each record; blank lines are none."""
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise BadInput(f"{where}, line {line}: holds a zero byte, so it is not a CSV table; give a text file")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    line = 1
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise BadInput(f"{where}, line {line}: not CSV ({error}); correct the quotes or the line") from None
        if cells:
            yield line, cells
        line = reader.line_num + 1


def _kind(header: list[str], line: int, where: str) -> str:
    if "id" not in header:
        shown = ", ".join(header)[:80]
        raise BadInput(f"{where}, line {line}: no column is called id (found: {shown}); name one id, unique per row")
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise BadInput(f"{where}, line {line}, column {twice[0]}: two columns have that name; rename one")
    kinds = [name for name, columns in table_kinds().items() if columns.mark in header]
    if len(kinds) != 1:
        marks = " or ".join(f"{columns.mark} ({columns.what})" for columns in table_kinds().values())
        found = "neither" if not kinds else "both"
        raise BadInput(f"{where}, line {line}: a table has the column {marks}, and this one has {found}; keep one")
    return kinds[0]


def _row(header: list[str], cells: list[str], columns: Columns, line: int, where: str) -> Row:
    if len(cells) != len(header):
        raise BadInput(
            f"{where}, line {line}: {len(cells)} cells under {len(header)} column names; "
            "quote a cell that holds a comma, or fill the row"
        )
    cell = dict(zip(header, (value.strip() for value in cells), strict=True))
    name = cell.pop("id")
    if not name:
        raise BadInput(f"{where}, line {line}, column id: is blank; give the row an id of its own")
    for least, checked in ((1, columns.whole), (0, columns.flags)):
        for column in checked:
            value = cell.get(column, "")
            if value and whole_number(value, least) is None:
                raise BadInput(
                    f"{where}, line {line}, column {column}: {value!r} is not a whole number of at least {least}; "
                    "correct it, or leave it blank if it is not known"
                )
    return Row(
        id=name,
        line=line,
        inputs={column: value for column, value in cell.items() if column in columns.inputs},
        outcomes={column: value for column, value in cell.items() if columns.is_outcome(column)},
    )


def whole_number(text: str, least: int = 0) -> int | None:
    """The whole number that a cell holds, as 8, 8.0 or 7.5e9 is one; None for anything else or less than `least`.

    >>> whole_number("7500000000.0"), whole_number("7.5"), whole_number("eight")
    (7500000000, None, None)
    """
    value = printed_number(text)
    # a longer number is no count of anything, and would take memory to write out
    if value is None or value.adjusted() > 30 or value != value.to_integral_value() or value < least:
        return None
    return int(value)


def printed_number(text: str) -> Decimal | None:
    """A number as printed, with the digits it was printed with; None where the text is not one number.

    >>> printed_number("31.40"), printed_number("4 + 16/d")
    (Decimal('31.40'), None)
    """
    if not text.isascii() or "_" in text:
        return None
    try:
        value = Decimal(text)
    except InvalidOperation:
        return None
    return value if value.is_finite() else None
