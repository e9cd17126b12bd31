"""What a proof found, as JSON: a result per cell, and of which code, on which machine."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from proofs.cells import Cell, Kind

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "proof.json"
"""Where results are kept while a proof goes on; git ignores it."""
RECORDED = ROOT / "docs" / "data" / "proof.json"
"""The copy that the page of what is proven is made from."""

PASSED = frozenset({"proven", "caught"})
"""Verdicts of a cell that passed: all is equal, or the planted fault was found and nothing else was blamed."""

APART = (
    "cli",
    "report",
    "scoring",
    "search",
    "data/accelerators",
    "data/clusters",
    "data/measured",
    "profiles/deepspeed",
    "profiles/deepspeed_estimator",
    "profiles/megatron",
    "profiles/paper",
    "profiles/torchtitan",
)
"""Folders of the package that no proof reads."""
BESIDE = ("tests/parity.py", "scripts/proofs/cells.py", "scripts/proofs/prove.py")
"""What else decides a verdict."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One cell.

    flags            as they are typed after `trainledger prove MODEL`
    lines            those with a prediction to meet; `equal` were measured so, `within` by no more off than they may be
    reported         lines without one
    saved_error      the worst relative error of activations that a rank saves; null where nothing is predicted of them
    peak_error       the same of its peak
    gradient_error   the worst relative error of a gradient against a run of one process; null where none is compared
    named            what was blamed, or why there is no answer
    code             digest of what the cell was proven with
    """

    id: str
    kind: Kind
    model: str
    flags: str
    ranks: int
    lines: int
    equal: int
    reported: int
    unexplained_bytes: int
    unexplained_calls: int
    gradient_error: float | None
    seconds: float
    verdict: str
    named: tuple[str, ...]
    code: str
    within: int = 0
    saved_error: float | None = None
    peak_error: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the proof stands as far as this cell goes."""
        return self.verdict in PASSED


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where a proof ran: nothing that names one machine among its kind."""

    cpu: str
    cores: int
    memory_bytes: int


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A whole proof.

    date      of the last cell, as YYYY-MM-DD
    seed      of the plans drawn at random
    commit    that was checked out
    changed   whether a file that decides a verdict was not as in that commit
    """

    date: str
    machine: Machine
    torch: str
    seed: int
    commit: str
    changed: bool
    code: str
    cells: tuple[Result, ...] = ()

    def of(self, cell: Cell) -> Result | None:
        """What is known of a cell that is still what it was; None where nothing is."""
        asked = (cell.id, cell.model, cell.words)
        return next((one for one in self.cells if (one.id, one.model, one.flags) == asked), None)

    def having(self, result: Result, date: str) -> Record:
        """The record with a result in place of an older one of the same cell."""
        others = tuple(one for one in self.cells if one.id != result.id)
        return msgspec.structs.replace(self, date=date, cells=(*others, result))


def deciding() -> Iterator[Path]:
    """The files that decide verdicts, in order."""
    package = ROOT / "src" / "trainledger"
    apart = tuple(package / folder for folder in APART)
    for path in sorted(package.rglob("*")):
        if path.suffix in {".py", ".toml", ".json"} and not any(path.is_relative_to(folder) for folder in apart):
            yield path
    yield from (ROOT / name for name in BESIDE)


def code_digest(torch: str, files: Iterable[Path] | None = None) -> str:
    """Digest of the files that decide verdicts, and of PyTorch's release."""
    found = hashlib.sha256(torch.encode())
    for path in deciding() if files is None else files:
        found.update(f"\n{path.relative_to(ROOT).as_posix()}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def here(torch: str, seed: int, code: str) -> Record:
    """A record of this machine and this checkout, without cells; its date is that of its last cell."""
    names = [path.relative_to(ROOT).as_posix() for path in deciding()]
    return Record(
        date="",
        machine=Machine(cpu=_cpu(), cores=os.cpu_count() or 1, memory_bytes=_memory_bytes()),
        torch=torch,
        seed=seed,
        commit=_git("rev-parse", "HEAD"),
        changed=bool(_git("status", "--porcelain", "--", *names)),
        code=code,
    )


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _cpu() -> str:
    """The model of the CPU as its maker calls it."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text(encoding="utf-8").splitlines() if listing.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def load(path: Path) -> Record | None:
    """The record in a file; None where there is no file."""
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except msgspec.MsgspecError as error:
        raise SystemExit(f"proof: {path.name} cannot be read: {error}; remove it to begin anew") from None


def store(record: Record, path: Path) -> None:
    """Write all of it or nothing: whoever is stopped here leaves the file as it was."""
    text = msgspec.json.format(msgspec.json.encode(record), indent=1)
    beside = path.with_suffix(".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside.write_bytes(text + b"\n")
    beside.replace(path)
