"""How many bytes of a checkpoint are tensors, and how many are what is written around them."""

from __future__ import annotations

import errno
import io
import os
import shutil
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import torch.distributed as dist

from trainledger.runtime.checkpoint.checkpoints import Checkpoints
from trainledger.runtime.checkpoint.folders import name_of
from trainledger.runtime.checkpoint.manifest import read_manifest
from trainledger.runtime.checkpoint.parts import SCALES, WEIGHTS
from trainledger.runtime.checkpoint.storage import Reader
from trainledger.runtime.program import Program


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a checkpoint on disk, as they were found in its files.

    weights_bytes, optimizer_bytes   elements of all tensors, each once
    scales_bytes                     scales of moments in 8 bits, for ranks that hold the same blocks
    file_bytes                       all files
    """

    weights_bytes: int
    optimizer_bytes: int
    scales_bytes: int
    file_bytes: int

    @property
    def payload_bytes(self) -> int:
        """All elements of tensors: what the ledger predicts."""
        return self.weights_bytes + self.optimizer_bytes


def trial(program: Program, step: int) -> Measured | None:
    """Save a checkpoint of a program where nobody looks for it, count what is in it, and remove it; collective.

    The answer is that of the first rank, whose folder all ranks must see; the others have none. SaveFailed where it
    cannot be written.
    """
    first = dist.get_rank() == 0
    told = [tempfile.mkdtemp(prefix="trainledger-checkpoint-") if first else ""]
    dist.broadcast_object_list(told)
    folder = Path(told[0])
    try:
        saved = Checkpoints(folder, program, asynchronous=False)
        try:
            saved.save(step)
        finally:
            saved.close()
        return measured_bytes(folder / name_of(step)) if first else None
    finally:
        if first:
            shutil.rmtree(folder, ignore_errors=True)


def measured_bytes(folder: Path) -> Measured:
    """What the files of one checkpoint hold: the records of its archives, not what is around them."""
    reader = Reader(folder, read_manifest(folder))
    found = Counter[str]()
    for key, amount in _records(folder, reader):
        found["scales" if SCALES in key else "weights" if key.startswith(WEIGHTS) else "optimizer"] += amount
    return Measured(
        weights_bytes=found["weights"],
        optimizer_bytes=found["optimizer"],
        scales_bytes=found["scales"],
        file_bytes=sum(path.stat().st_size for path in folder.iterdir()),
    )


def _records(folder: Path, reader: Reader) -> Iterator[tuple[str, int]]:
    """(key, bytes of the elements) of each part: PyTorch writes an archive of its own for each."""
    by_file: dict[str, list[tuple[str, Any]]] = {}
    assert isinstance(reader.index.storage_data, dict)
    for index, place in reader.index.storage_data.items():
        by_file.setdefault(place.relative_path, []).append((index.fqn, place))
    for name, places in by_file.items():
        with (folder / name).open("rb") as file:
            for key, place in places:
                with zipfile.ZipFile(_Slice(file, place.offset, place.length)) as archive:
                    yield key, sum(entry.file_size for entry in archive.infolist() if "/data/" in entry.filename)


class _Slice(io.RawIOBase):
    """A part of a file as a file of its own. PyTorch's view of one seeks the wrong way from the end."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file = file
        self._offset = offset
        self._length = length
        self._at = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move within the slice."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if self._at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        """As many bytes as asked for, or up to the end."""
        left = max(0, self._length - self._at)
        self._file.seek(self._offset + self._at)
        found = self._file.read(left if size < 0 else min(size, left))
        self._at += len(found)
        return found
