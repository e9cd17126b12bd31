"""What was measured on one card, as JSON: rows with their units, and the run that they are from."""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import msgspec

from trainledger.errors import BadInput

FOLDER = Path(__file__).resolve().parents[2] / "src" / "trainledger" / "data" / "measured" / "cards"
"""Where `make gpu` keeps its records: one file per run."""

Section = Literal["gemm", "peak", "step", "saved"]
SECTIONS: tuple[Section, ...] = get_args(Section)
Unit = Literal["B", "s", "FLOP/s", "of peak", "tokens/s", "times"]

UNITS: dict[Section, frozenset[Unit]] = {
    "gemm": frozenset({"s", "FLOP/s", "of peak"}),
    "peak": frozenset({"B"}),
    "step": frozenset({"s", "tokens/s", "times"}),
    "saved": frozenset({"B"}),
}
"""What rows of a section are measured in."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One measured figure.

    id          section, what was run, and the meter, with slashes between
    amount      the median where it was measured several times, of which `low` and `high` are the ends
    predicted   what the ledger says of it, in the same unit; None where it says nothing, and `note` says why
    """

    id: str
    amount: float
    unit: Unit
    predicted: float | None = None
    note: str = ""
    repeats: int = 1
    low: float | None = None
    high: float | None = None

    @property
    def section(self) -> str:
        """The first part of the id."""
        return self.id.partition("/")[0]


def several(name: str, unit: Unit, amounts: Sequence[float], *, note: str = "") -> Row:
    """The row of what was measured several times: the median, and the ends."""
    middle, low, high = statistics.median(amounts), min(amounts), max(amounts)
    return Row(id=name, amount=middle, unit=unit, note=note, repeats=len(amounts), low=low, high=high)


class Lacking(msgspec.Struct, frozen=True, kw_only=True):
    """What was to be measured and was not: why."""

    id: str
    why: str


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it was measured: nothing that names one machine among its kind.

    device         cuda or cpu
    card           as its driver calls it; of a CPU its architecture
    accelerator    the file of data/accelerators that peak rates are from; "" where none has that name
    driver, power_limit, cuda   "" on a CPU
    """

    device: Literal["cuda", "cpu"]
    card: str
    accelerator: str
    driver: str
    power_limit: str
    cuda: str
    torch: str
    torchao: str
    python: str


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run on one card.

    command   as it was typed
    date      of the run, as YYYY-MM-DD
    commit    that was checked out; changed: some file of the checkout was not as in that commit
    lacking   what was to be measured and was not
    """

    command: str
    date: str
    machine: Machine
    commit: str
    changed: bool
    seconds: float
    rows: tuple[Row, ...]
    lacking: tuple[Lacking, ...] = ()


def read(path: Path) -> Record:
    """The record in a file; what is no record, or breaks a rule of them, is refused."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Record)
    except OSError as error:
        raise BadInput(f"{path.name}: cannot be read: {error.strerror}; check the path") from None
    except msgspec.MsgspecError as error:
        raise BadInput(f"{path.name} is no record of `make gpu`: {error}; measure anew, or remove the file") from None
    check(found, path.name)
    return found


def check(record: Record, where: str) -> None:
    """Refuse a record whose rows are not what they say: ids, units, numbers, date."""
    try:
        datetime.date.fromisoformat(record.date)
    except ValueError:
        raise BadInput(f"{where}: date is {record.date!r}: write it as YYYY-MM-DD") from None
    if not record.rows:
        raise BadInput(f"{where} has no row: a record without a figure says nothing; measure anew")
    known: set[str] = set()
    for row in record.rows:
        if row.section not in SECTIONS:
            raise BadInput(f"{where}: {row.id} begins with none of {', '.join(SECTIONS)}: correct its id")
        if row.id in known:
            raise BadInput(f"{where}: {row.id} stands twice: remove one of the two")
        known.add(row.id)
        _check_row(row, where)


def _check_row(row: Row, where: str) -> None:
    units = next(units for section, units in UNITS.items() if section == row.section)
    if row.unit not in units:
        raise BadInput(f"{where}: {row.id} is in {row.unit}: rows of its section are in {', '.join(sorted(units))}")
    low, high = (row.amount if end is None else end for end in (row.low, row.high))
    for number in (row.amount, low, high, 1.0 if row.predicted is None else row.predicted):
        if not (math.isfinite(number) and number > 0):
            raise BadInput(f"{where}: {row.id} has {number:g}: a measured figure is finite and above 0; measure anew")
    if not low <= row.amount <= high:
        raise BadInput(f"{where}: {row.id} is {row.amount:g} and not within {low:g} and {high:g}; measure anew")


def write(record: Record, path: Path) -> None:
    """Write all of a record or nothing."""
    check(record, path.name)
    text = msgspec.json.format(msgspec.json.encode(record), indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_bytes(text + b"\n")
    beside.replace(path)


def keep(record: Record, folder: Path = FOLDER) -> Path:
    """Write the record of a card under a name that no other has, and say which."""
    machine = record.machine
    if machine.device != "cuda":
        raise BadInput(f"what is kept was measured on a card, and this on {machine.device}; use --out FILE instead")
    name = f"{(machine.accelerator or machine.card).replace(' ', '-')}-{record.date}"
    names = (name, *(f"{name}-{number}" for number in range(2, 1000)))
    path = next(path for path in (folder / f"{one}.json" for one in names) if not path.exists())
    write(record, path)
    return path
