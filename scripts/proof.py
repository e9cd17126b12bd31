"""Prove every cell of the proof in order, keep each answer, and fail if one is not as predicted.

    python scripts/proof.py [--list] [--only TEXT] [--again] [--seed N] [--record]        (or: make proof)

Answers are kept in proof.json, which git ignores; a run that was stopped goes on where it was, and a cell that passed
is not run again until the code that decides it, or PyTorch, has changed. --record copies a whole proof of a commit to
docs/data/proof.json, which the page of what is proven is made from.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from proofs.cells import Cell, every
from proofs.prove import proven
from proofs.record import RECORDED, RESULTS, Record, Result, code_digest, here, load, store
from proofs.screen import Screen, expected_s, screen, span, told
from trainledger.runtime.progress import Progress

Prover = Callable[[Cell, str, Progress | None], Result]
"""Proves a cell with the code of a digest, and says how far it is."""

INTERRUPTED = 130


class Changed(Exception):
    """The code is not what it was when the run began."""


def main(
    arguments: Sequence[str],
    *,
    cells: Sequence[Cell] | None = None,
    prover: Prover = proven,
    results: Path = RESULTS,
    recorded: Path = RECORDED,
) -> int:
    """Run what is asked for; 1 when a cell did not pass, or a record cannot be made."""
    asked = _parser().parse_args(arguments)
    if asked.record and asked.only:
        print("proof: --record keeps a whole proof, and --only runs a part of one; leave one out", file=sys.stderr)
        return 2
    known = cells if cells is not None else every(asked.seed)
    chosen = [cell for cell in known if not asked.only or any(text in cell.id for text in asked.only)]
    if not chosen:
        print(f"proof: no cell has {' or '.join(asked.only)} in its name; --list shows all", file=sys.stderr)
        return 2
    if asked.list:
        print("\n".join(f"{cell.id:44} {cell.model} {cell.words}" for cell in chosen))
        return 0
    torch = importlib.metadata.version("torch")
    record = here(torch, asked.seed, code_digest(torch))
    old = load(results)
    if old is not None:
        record = msgspec.structs.replace(record, date=old.date, cells=old.cells)
    try:
        record = _run(chosen, record, prover, results, again=asked.again)
    except KeyboardInterrupt:
        print("proof: stopped; what is done is kept, and the next run goes on from there", file=sys.stderr)
        return INTERRUPTED
    except Changed:
        print("proof: the code changed while it was being proven; run it again", file=sys.stderr)
        return 1
    status = _summary(chosen, record)
    return _recorded(chosen, record, recorded) if asked.record and not status else status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="proof.py", description="Prove every cell, and keep each answer.")
    parser.add_argument("--list", action="store_true", help="name the cells and run none")
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="cells with this in their name; may be repeated"
    )
    parser.add_argument("--again", action="store_true", help="run cells that have passed, too")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the plans drawn at random [0]")
    parser.add_argument("--record", action="store_true", help="keep a whole proof for the documentation")
    return parser


def _passed(cell: Cell, record: Record) -> bool:
    """Whether a cell passed with the code that the record is of."""
    known = record.of(cell)
    return known is not None and known.passed and known.code == record.code


def _run(cells: Sequence[Cell], record: Record, prover: Prover, results: Path, *, again: bool) -> Record:
    """The record with an answer for each cell, stored after every one."""
    rest = [cell for cell in cells if again or not _passed(cell, record)]
    done = len(cells) - len(rest)
    already = f", of which {done} have passed with this code" if done else ""
    with screen(len(rest)) as out:
        out.line(f"proof: {len(cells)} cells{already}; plans drawn with --seed {record.seed}, torch {record.torch}")
        earlier = {result.id: result.seconds for result in record.cells if result.passed}
        taken: list[tuple[str, float]] = []
        for number, cell in enumerate(rest, start=1):
            where = f"[{done + number}/{len(cells)}]"
            start = time.perf_counter()
            result = prover(cell, record.code, out.cell(f"{where} {cell.id}"))
            taken.append((cell.kind, time.perf_counter() - start))
            if code_digest(record.torch) != record.code:
                raise Changed
            record = record.having(result, datetime.datetime.now(datetime.UTC).date().isoformat())
            store(record, results)
            _say(out, where, result, [expected_s(one, earlier, taken) for one in rest[number:]])
    return record


def _say(out: Screen, where: str, result: Result, left: Sequence[float | None]) -> None:
    """One line about a cell, and how long the others may take; kinds that have not been met count nothing."""
    known = [seconds for seconds in left if seconds is not None]
    more = "" if len(known) == len(left) else " at least"
    out.line(f"{where} {told(result)}" + (f"; {span(sum(known))}{more} left" if left else ""))


def _summary(cells: Sequence[Cell], record: Record) -> int:
    """Say what did not pass; 1 if anything did not."""
    wrong = [cell for cell in cells if not _passed(cell, record)]
    for cell in wrong:
        found = record.of(cell)
        print(f"\nproof: {cell.id} did not pass: trainledger prove {cell.model} {cell.words}")
        for name in found.named if found is not None else ():
            print(f"    {name}")
    lines = sum(found.equal for cell in cells if (found := record.of(cell)) is not None)
    print(f"\nproof: {len(cells) - len(wrong)} of {len(cells)} cells passed, {lines:,} lines equal")
    return 1 if wrong else 0


def _recorded(cells: Sequence[Cell], record: Record, path: Path) -> int:
    """Write the copy for the documentation, if it is of a commit."""
    if record.changed:
        print("proof: what was proven is not in a commit yet; commit it, then --record", file=sys.stderr)
        return 1
    kept = tuple(found for cell in cells if (found := record.of(cell)) is not None)
    store(msgspec.structs.replace(record, cells=kept), path)
    print(f"proof: recorded {len(kept)} cells; `make docs` writes the page")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
