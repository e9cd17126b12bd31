"""Measure one card: products in bf16 and FP8, three peaks, step times, and what a block keeps for its backward.

    python scripts/gpu.py [--device cuda|cpu] [--only SECTION] [--out FILE] [--record]      (or: make gpu)

Figures of which the ledger says something stand beside what it says. --record keeps them under
src/trainledger/data/measured/cards, with the command, the date and the machine; --out writes the same elsewhere. On a
CPU the same functions run at small sizes, which shows that they run, and nothing of a card: such a run is not kept.
What cannot be measured is listed with the reason, and the exit status is 1; what was measured is written all the same.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cards.record import SECTIONS, Lacking, Record, Row, Section, keep, write
from trainledger.errors import TrainledgerError, UsageError

ROOT = Path(__file__).resolve().parent.parent
BUDGET_S = 300
"""A measurement that would begin later is left out, and said to be; the checks have the rest of six minutes."""


class Work(NamedTuple):
    """Something to measure, by what its rows begin with."""

    id: str
    rows: Callable[[], Iterable[Row]]


class Found(NamedTuple):
    """Rows, and what there is none of."""

    rows: tuple[Row, ...]
    lacking: tuple[Lacking, ...]


def measure(every: Iterable[Work], deadline_s: float, now: Callable[[], float] = time.monotonic) -> Found:
    """Do all of it, each begun before the deadline on the clock; one that fails does not end the others."""
    rows: list[Row] = []
    lacking: list[Lacking] = []
    start = now()
    for work in every:
        if now() >= deadline_s:
            lacking.append(Lacking(id=work.id, why=f"{now() - start:.0f} s were gone before it could begin"))
            continue
        try:
            for row in work.rows():
                rows.append(row)
                print(_told(row), flush=True)
        except Exception as error:  # noqa: BLE001  # whatever a driver or a compiler raises, the rest is measured
            lacking.append(Lacking(id=work.id, why=f"{type(error).__name__}: {error}"))
        print(f"{'':8}{now() - start:.0f} s since the start, {deadline_s - now():.0f} s are left", flush=True)
    return Found(tuple(rows), tuple(lacking))


def works(device: Any, sections: Sequence[Section]) -> Iterator[Work]:  # noqa: ANN401  # torch is imported late
    """What is measured on a device, the longest last."""
    from cards import gemms, peaks, saved, steps
    from cards.sizes import SIZES

    sizes = SIZES[device.type]
    if "gemm" in sections:
        yield Work(f"gemm/{sizes.gemm_model}", partial(gemms.rows_of, device, sizes))
    if "peak" in sections:
        for plan in peaks.PLANS:
            yield Work(f"peak/{'/'.join(plan)}", partial(peaks.rows_of, plan, device, sizes))
    if "step" in sections:
        yield Work("step", partial(steps.rows_of, device, sizes))
    if "saved" in sections:
        for way in saved.ways(sizes):
            yield Work(way.id, partial(saved.rows_of, way, device, sizes))


def _told(row: Row) -> str:
    amount = f"{row.amount:,.0f}" if row.amount >= 1000 else f"{row.amount:.4g}"
    beside = "" if row.predicted is None else f"  ledger {row.predicted:,.0f}, {row.predicted / row.amount - 1:+.2%}"
    return f"{row.id:84} {amount:>20} {row.unit}{beside}"


def main(arguments: Sequence[str]) -> int:
    """Measure what is asked for; 1 where something could not be measured."""
    asked = _parser().parse_args(arguments)
    try:
        return _run(asked, f"python scripts/gpu.py {shlex.join(arguments)}".strip())
    except TrainledgerError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def _run(asked: argparse.Namespace, command: str) -> int:
    import torch

    from cards.here import alone, machine_here

    start = time.monotonic()
    if asked.device == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"torch {torch.__version__} finds no CUDA device; run it on a machine that has one")
    if asked.record and (asked.device != "cuda" or asked.only):
        raise UsageError("--record keeps a whole run on a card: leave --only out, and --device cpu")
    device = torch.device(asked.device, 0) if asked.device == "cuda" else torch.device("cpu")
    machine, commit, changed = machine_here(device), _git("rev-parse", "HEAD"), bool(_git("status", "--porcelain"))
    print(f"{machine.card}, torch {machine.torch}; {BUDGET_S} s to begin all that is measured")
    with alone(device) if device.type == "cuda" or asked.only != ["saved"] else nullcontext():
        found = measure(works(device, asked.only or SECTIONS), start + BUDGET_S)
    record = Record(
        command=command,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        machine=machine,
        commit=commit,
        changed=changed,
        seconds=round(time.monotonic() - start, 1),
        rows=found.rows,
        lacking=found.lacking,
    )
    if asked.out is not None:
        write(record, asked.out)
    if asked.record:
        print(f"kept as {keep(record).relative_to(ROOT)}")
    for one in found.lacking:
        print(f"gpu: {one.id} was not measured: {one.why}", file=sys.stderr)
    print(f"{len(found.rows)} figures in {record.seconds:.0f} s")
    return 1 if found.lacking else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu.py", description="Measure one card beside the ledger.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where [cuda]")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="a section; may be repeated")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the record here")
    parser.add_argument("--record", action="store_true", help="keep the record in data/measured/cards")
    return parser


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
