"""Prove one cell: the same call as the command line's, in this process, and its gradients against one process."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from proofs.cells import FAULTS, Cell
from proofs.record import ROOT, Result
from trainledger.account.rank_memory import PEAK, SAVED
from trainledger.reconcile.verdict import WRONG, Item, Verdict
from trainledger.runtime.observe.observation import Observation
from trainledger.runtime.progress import Progress
from trainledger.runtime.spec import RunSpec
from trainledger.service import prove
from trainledger.service.prove_launch import How, launch
from trainledger.service.prove_plan import planned

MOST_NAMED = 5
"""Of what a comparison blames."""
TOLD = ("schedule", "cp_comm", "recompute", "early_stop", "loss_parallel", "optimizer", "pp_layout")
"""What a comparison of gradients is told beside the plan."""


def proven(cell: Cell, code: str, progress: Progress | None) -> Result:
    """The verdict on a cell, whatever goes wrong in it."""
    start = time.perf_counter()
    try:
        found = _compared(cell, code, progress)
    except Exception as error:  # noqa: BLE001 - one cell that breaks must not end the others
        found = broken(cell, code, error)
    return msgspec.structs.replace(found, seconds=round(time.perf_counter() - start, 1))


def broken(cell: Cell, code: str, error: Exception) -> Result:
    """A cell that gave no answer."""
    said = str(error).splitlines() or [""]
    return Result(
        id=cell.id,
        kind=cell.kind,
        model=cell.model,
        flags=cell.words,
        ranks=0,
        lines=0,
        equal=0,
        reported=0,
        unexplained_bytes=0,
        unexplained_calls=0,
        gradient_error=None,
        seconds=0.0,
        verdict="failed",
        named=(f"{type(error).__name__}: {said[0]}", *said[1:][1 - MOST_NAMED :]),
        code=code,
    )


def _compared(cell: Cell, code: str, progress: Progress | None) -> Result:
    def spoilt(spec: RunSpec, how: How, progress: Progress | None) -> Sequence[Observation]:
        return launch(msgspec.structs.replace(spec, faults=(cell.fault,)), how, progress)

    answer = prove.run(cell.request, runner=spoilt if cell.fault else None, progress=progress)
    judged = [line for line in answer.lines if line.verdict != "reported"]
    blamed = [*map(_line, (line for line in judged if line.verdict in WRONG)), *map(_item, answer.unexplained.items)]
    error, where = _gradient_error(cell) if cell.parity and answer.verdict == "proven" else (None, "")
    verdict, named = _verdict(cell, answer.verdict, blamed, error, where)
    return Result(
        id=cell.id,
        kind=cell.kind,
        model=cell.model,
        flags=cell.words,
        ranks=answer.world_size,
        lines=len(judged),
        equal=sum(line.verdict == "equal" for line in judged),
        within=sum(line.verdict == "within" for line in judged),
        reported=len(answer.lines) - len(judged),
        saved_error=_worst(answer.lines, SAVED),
        peak_error=_worst(answer.lines, PEAK),
        unexplained_bytes=answer.unexplained.bytes,
        unexplained_calls=answer.unexplained.calls,
        gradient_error=error,
        seconds=0.0,
        verdict=verdict,
        named=tuple(named[:MOST_NAMED]),
        code=code,
    )


def _worst(lines: Iterable[Verdict], identity: str) -> float | None:
    """The largest error of a modelled line, relative to what was measured, of all ranks where it is judged."""
    judged = (one for one in lines if one.id == identity and one.verdict in ("within", "beyond"))
    errors = [abs(one.predicted / one.measured - 1) for one in judged if one.predicted and one.measured]
    return max(errors, default=None)


def _line(line: Verdict) -> str:
    """A line that is not as predicted, in words."""
    measured = "nothing" if line.measured is None else f"{line.measured:,}"
    at = f" at {line.instant}" if line.instant else ""
    return f"{line.id}{at}: {line.predicted or 0:,} predicted, {measured} measured"


def _item(item: Item) -> str:
    """What no line claims, in words."""
    shape = f" {'x'.join(map(str, item.shape))}" if item.shape else ""
    return f"{item.op}{shape}: {item.bytes:,} B that no line claims"


def _verdict(
    cell: Cell, said: str, blamed: Iterable[str], error: float | None, where: str
) -> tuple[str, Sequence[str]]:
    """(verdict, what is named); ranks that say the same are told of once."""
    once = tuple(dict.fromkeys(blamed))
    if cell.fault:
        found = said == "differs" and bool(once) and all(name.startswith(FAULTS[cell.fault]) for name in once)
        return "caught" if found else "missed", once
    if said == "proven" and error is not None and not error < _parity().TOLERANCE:
        return "gradients", (f"gradients differ by {error:.2g}: {where}",)
    return said, once


def _parity() -> Any:  # noqa: ANN401 - a module of tests, which scripts are not checked with
    """tests/parity.py, which brings torch."""
    tests = str(ROOT / "tests")
    if tests not in sys.path:
        sys.path.append(tests)
    return importlib.import_module("parity")


def _gradient_error(cell: Cell) -> tuple[float, str]:
    """(the worst relative error of a gradient, where) of the same plan on a model of the same kind."""
    worst = _parity().check(counterpart(cell))
    return float(worst.error), str(worst.where)


def counterpart(cell: Cell) -> Any:  # noqa: ANN401 - as _parity
    """What tests/parity.py is asked of a cell."""
    spec = planned(cell.request).spec
    blank = RunSpec(model=spec.model, config={}, plan={}, seq=spec.seq)
    chosen = {name: getattr(spec, name) for name in TOLD}
    fields = {
        name: value
        for name, value in chosen.items()
        if value != getattr(blank, name) or (name == "optimizer" and "optimizer" in cell.flags)
    }
    layers = max(2, spec.plan["pp"] * spec.plan["vpp"])
    return _parity().Cell(cell.parity, spec.plan, fields, layers)
