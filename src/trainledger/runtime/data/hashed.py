"""Hashes of files that need not be read again: kept beside them, and good for as long as nobody has written them.

A file whose size, time of writing, time of change and number are those of when it was hashed has the bytes that were
hashed then. The time of change is set by the kernel at every write and rename, and by nobody else. What a disk does to
bytes without being told is not seen by it. No torch here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from trainledger.runtime.files import write_whole

SETTLED_NS = 3 * 10**9
"""A file that has changed so shortly before may change again at what its file system takes for the same time."""


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """What tells that a file was written: size, times in nanoseconds, number in its file system."""

    size: int
    written_ns: int
    changed_ns: int
    inode: int


class _Kept(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A hash, and the files that it is of."""

    stamps: tuple[Stamp, ...]
    sha256: str


def hash_of(paths: Sequence[Path], compute: Callable[[], str], record: Path) -> str:
    """The hash of files: as `record` has it where they are as they were then, else computed, and kept if it can be.

    Raises what `compute` does, and OSError for a file that is not there.
    """
    stamps, now_ns = _stamps(paths), time.time_ns()
    kept = _read(record)
    if kept is not None and kept.stamps == stamps:
        return kept.sha256
    found = compute()
    settled = all(stamp.changed_ns + SETTLED_NS < now_ns for stamp in stamps)
    if settled and _stamps(paths) == stamps:
        # whoever may read the files and write nothing beside them reads them each time
        with suppress(OSError):
            write_whole(record, msgspec.json.encode(_Kept(stamps=stamps, sha256=found)))
    return found


def _stamps(paths: Sequence[Path]) -> tuple[Stamp, ...]:
    return tuple(
        Stamp(size=of.st_size, written_ns=of.st_mtime_ns, changed_ns=of.st_ctime_ns, inode=of.st_ino)
        for of in (path.stat() for path in paths)
    )


def _read(record: Path) -> _Kept | None:
    """What is kept; None where nothing is, or nothing that this release knows."""
    try:
        return msgspec.json.decode(record.read_bytes(), type=_Kept)
    except (OSError, msgspec.MsgspecError):
        return None
