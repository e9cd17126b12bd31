"""`diff`: two plans side by side, only the lines that moved."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Annotated

import msgspec

from trainledger.errors import BadInput
from trainledger.lines import Line
from trainledger.service.ledger import account
from trainledger.service.plan_file import SUFFIX
from trainledger.service.requests import INPUT, PlanRequest, flag


class Request(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """Two plans, and the lines that moved between them."""

    a: Annotated[
        str, flag("A PLAN file (.toml), or what `ledger --json` wrote (.json).", "A", group=INPUT, positional=True)
    ]
    b: Annotated[str, flag("The other one.", "B", group=INPUT, positional=True)]


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """A line that is not the same on both sides; a side that lacks it holds 0."""

    id: str
    a: int | float
    b: int | float
    delta: int | float
    unit: str


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The lines that moved, largest first, and the totals of both sides.

    totals   memory (the allocated meter's estimate) and what a step sends over all axes, per rank of the pipeline stage
             that holds most on that side
    same     how many lines are equal on both sides
    """

    a: str
    b: str
    lines: tuple[Moved, ...]
    same: int
    totals: tuple[Moved, ...]

    @property
    def exit_code(self) -> int:
        """A difference is an answer."""
        return 0


class _Meter(msgspec.Struct, frozen=True):
    estimate: int


class _Memory(msgspec.Struct, frozen=True):
    meters: dict[str, _Meter]


class _Ledger(msgspec.Struct, frozen=True):
    """What is read back of `ledger --json`."""

    lines: tuple[Line, ...]
    memory: _Memory


def run(request: Request) -> Response:
    """Compare the two."""
    left, right = _load(request.a), _load(request.b)
    ours, theirs = _sums(left), _sums(right)
    moved = [_moved(name, ours.get(name, (0, "")), theirs.get(name, (0, ""))) for name in {**ours, **theirs}]
    changed = sorted((line for line in moved if line.delta), key=lambda line: (-abs(line.delta), line.id))
    return Response(
        a=request.a,
        b=request.b,
        lines=tuple(changed),
        same=len(moved) - len(changed),
        totals=tuple(_totals(left, right)),
    )


def _load(path: str) -> _Ledger:
    if path.endswith(SUFFIX):
        found = account(PlanRequest(model=path))
        meters = {name: _Meter(estimate=meter.estimate) for name, meter in found.memory.meters.items()}
        return _Ledger(lines=found.lines, memory=_Memory(meters=meters))
    try:
        raw = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); give a PLAN file or a ledger as JSON") from None
    try:
        return msgspec.json.decode(raw, type=_Ledger)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(
            f"{path} is not a ledger ({error}); write one with `ledger ... --json`, or give a PLAN file (.toml)"
        ) from None


def _sums(ledger: _Ledger) -> dict[str, tuple[int | float, str]]:
    """(amount, unit) by line id; lines that share an id are added."""
    sums: dict[str, tuple[int | float, str]] = {}
    for line in ledger.lines:
        before = sums.get(line.id, (0, line.unit))[0]
        sums[line.id] = (before + line.amount, line.unit)
    return sums


def _moved(name: str, ours: tuple[int | float, str], theirs: tuple[int | float, str]) -> Moved:
    return Moved(id=name, a=ours[0], b=theirs[0], delta=theirs[0] - ours[0], unit=ours[1] or theirs[1])


def _totals(left: _Ledger, right: _Ledger) -> list[Moved]:
    totals: list[Moved] = []
    for meter in (name for name in left.memory.meters if name in right.memory.meters):
        pair = (left.memory.meters[meter].estimate, right.memory.meters[meter].estimate)
        totals.append(_moved(f"memory, {meter}", (pair[0], "B"), (pair[1], "B")))
    sent = [sum(line.amount for line in side.lines if line.id.startswith("moved/")) for side in (left, right)]
    totals.append(_moved("sent per step", (sent[0], "B"), (sent[1], "B")))
    return totals
