"""Ways in which a checkpoint can be wrong, and what a load makes of each."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from checkpoint_runs import Ask, program_of
from trainledger.errors import BadInput
from trainledger.runtime.checkpoint.checkpoints import Checkpoints
from trainledger.runtime.checkpoint.manifest import MANIFEST, File, read_manifest, write_manifest
from trainledger.runtime.checkpoint.storage import INDEX, HashedFile

SHARD = "__0_0.distcp"


class Judged(NamedTuple):
    """What a load said: the step that it began from (None: from nothing), what was passed over, or why it refused."""

    begun: int | None = None
    skipped: tuple[tuple[Path, str], ...] = ()
    refused: str = ""


def judged(rank: int, asks: list[Ask]) -> list[Judged]:
    """What a load of each says."""
    del rank
    return [_judged(ask) for ask in asks]


def _judged(ask: Ask) -> Judged:
    program = program_of(ask.spec)
    kept = Checkpoints(ask.folder, program)
    try:
        loaded = kept.load()
    except BadInput as error:
        assert not program.optimizer.state, "states that were made to be filled are gone"
        return Judged(refused=str(error))
    finally:
        kept.close()
    return Judged() if loaded is None else Judged(loaded.step, loaded.skipped)


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def sealed_again(folder: Path, name: str, content: bytes) -> None:
    """Write a file and a manifest that vouches for it, as someone would who means harm."""
    (folder / name).write_bytes(content)
    manifest = read_manifest(folder)
    file = File(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    (folder / MANIFEST).unlink()
    write_manifest(folder, msgspec.structs.replace(manifest, files={**manifest.files, name: file}))


class Hostile:
    """Unpickled, it makes a folder."""

    def __init__(self, proof: Path) -> None:
        self._proof = proof

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self._proof),)


def _hostile_index(folder: Path) -> None:
    sealed_again(folder, INDEX, pickle.dumps(Hostile(folder / "executed")))


def _bytes_entry(folder: Path) -> None:
    """An index that says that a weight is bytes, which PyTorch would unpickle from the shard."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    index = pickle.loads((folder / INDEX).read_bytes())  # noqa: S301  # written by this test's own run
    index.state_dict_metadata[next(iter(index.state_dict_metadata))] = BytesStorageMetadata()
    sealed_again(folder, INDEX, pickle.dumps(index))


def _outside(folder: Path) -> None:
    """An index that places a weight in a file elsewhere."""
    index = pickle.loads((folder / INDEX).read_bytes())  # noqa: S301  # written by this test's own run
    next(iter(index.storage_data.values())).relative_path = "../elsewhere.distcp"
    sealed_again(folder, INDEX, pickle.dumps(index))


def _manifest_of_another_step(folder: Path) -> None:
    manifest = msgspec.structs.replace(read_manifest(folder), step=77)
    (folder / MANIFEST).unlink()
    write_manifest(folder, manifest)


def _a_digit_of_the_manifest(folder: Path) -> None:
    text = (folder / MANIFEST).read_text()
    step = json.loads(text)["manifest"]["step"]
    (folder / MANIFEST).write_text(text.replace(f'"step": {step}', f'"step": {step + 1}'))


def _names_a_file_elsewhere(folder: Path) -> None:
    manifest = read_manifest(folder)
    (folder / MANIFEST).unlink()
    write_manifest(folder, msgspec.structs.replace(manifest, files={"../x": manifest.files[SHARD]}))


DAMAGES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "a flipped bit": (lambda folder: flip(folder / SHARD), SHARD, "SHA-256 differs"),
    "a flipped bit of the index": (lambda folder: flip(folder / INDEX), INDEX, "SHA-256 differs"),
    "a truncated file": (lambda folder: os.truncate(folder / SHARD, 1000), SHARD, "has 1000 B"),
    "a missing file": (lambda folder: (folder / SHARD).unlink(), SHARD, "is missing"),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), MANIFEST, "cannot be read"),
    "a pipe for a manifest": (lambda folder: _piped(folder / MANIFEST), MANIFEST, "is no regular file"),
    "a pipe for a shard": (lambda folder: _piped(folder / SHARD), SHARD, "is no regular file"),
    "a manifest without a seal": (lambda folder: _write(folder / MANIFEST, b"{}"), MANIFEST, "it has no 'manifest'"),
    "an unreadable manifest": (lambda folder: os.truncate(folder / MANIFEST, 100), MANIFEST, "is not a manifest"),
    "a manifest that is no object": (lambda folder: _write(folder / MANIFEST, b"[1]"), MANIFEST, "is not a manifest"),
    "a manifest without an end of depth": (
        lambda folder: _write(folder / MANIFEST, b"[" * 100_000),
        MANIFEST,
        "is not a manifest",
    ),
    "a changed manifest": (_a_digit_of_the_manifest, MANIFEST, "not as it was written"),
    "a manifest of another step": (_manifest_of_another_step, MANIFEST, "is of step 77"),
    "a manifest that names files elsewhere": (_names_a_file_elsewhere, MANIFEST, "'../x'"),
    "a hostile index": (_hostile_index, INDEX, "posix.mkdir, which no index does"),
    "an index of no tensor": (_bytes_entry, INDEX, "is no tensor"),
    "an index of files elsewhere": (_outside, INDEX, "'../elsewhere.distcp'"),
}
"""What is done to the newest checkpoint; the file that is to be named, and what is to be said of it."""


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def copied(source: Path, target: Path) -> Path:
    """A folder of checkpoints, without the lock."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(".lock"))
    return target


@contextmanager
def full_disk(suffix: str, room_bytes: int) -> Generator[None]:
    """Let files of this end take so many bytes together, as a disk does that has no more."""
    inside, left = HashedFile.__init__, [room_bytes]

    class Disk:
        def __init__(self, file: Any) -> None:  # noqa: ANN401  # an open file
            self._file = file

        def write(self, data: Any) -> int:  # noqa: ANN401  # anything with a buffer
            left[0] -= memoryview(data).nbytes
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self._file.write(data)

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # of the file
            return getattr(self._file, name)

    def opened(self: HashedFile, path: Path) -> None:
        inside(self, path)
        if path.name.endswith(suffix):
            self._file = Disk(self._file)  # pyright: ignore[reportAttributeAccessIssue]  # it acts as one

    HashedFile.__init__ = opened
    try:
        yield
    finally:
        HashedFile.__init__ = inside
