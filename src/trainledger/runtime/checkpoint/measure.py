"""How many bytes of a checkpoint are tensors, and how many are what is written around them."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from trainledger.runtime.checkpoint.manifest import read_manifest
from trainledger.runtime.checkpoint.parts import WEIGHTS
from trainledger.runtime.checkpoint.storage import Reader


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a checkpoint on disk, as they were found in its files.

    weights_bytes, optimizer_bytes   elements of all tensors, each once
    file_bytes                       all files
    """

    weights_bytes: int
    optimizer_bytes: int
    file_bytes: int

    @property
    def payload_bytes(self) -> int:
        """All elements: what the ledger predicts."""
        return self.weights_bytes + self.optimizer_bytes


def measured_bytes(folder: Path) -> Measured:
    """What the files of one checkpoint hold: the records of its archives, not what is around them."""
    reader = Reader(folder, read_manifest(folder))
    found = {True: 0, False: 0}
    for key, amount in _records(folder, reader):
        found[key.startswith(WEIGHTS)] += amount
    files = sum(path.stat().st_size for path in folder.iterdir())
    return Measured(weights_bytes=found[True], optimizer_bytes=found[False], file_bytes=files)


def _records(folder: Path, reader: Reader) -> Iterator[tuple[str, int]]:
    """(key, bytes of the elements) of each part: PyTorch writes an archive of its own for each."""
    by_file: dict[str, list[tuple[str, Any]]] = {}
    assert isinstance(reader.index.storage_data, dict)
    for index, place in reader.index.storage_data.items():
        by_file.setdefault(place.relative_path, []).append((index.fqn, place))
    for name, places in by_file.items():
        with (folder / name).open("rb") as file:
            for key, place in places:
                with zipfile.ZipFile(reader._slice_file(file, place)) as archive:  # private: PyTorch's view of a slice
                    yield key, sum(entry.file_size for entry in archive.infolist() if "/data/" in entry.filename)
