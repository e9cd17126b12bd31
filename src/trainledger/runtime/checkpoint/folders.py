"""The folders of checkpoints: named by step, published by a rename, cleared of what a dead run left, and pruned."""

from __future__ import annotations

import fcntl
import re
import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from trainledger.errors import BadInput
from trainledger.runtime.checkpoint.manifest import MANIFEST, Damaged, Manifest, check_sizes, read_manifest
from trainledger.runtime.files import sync

_PUBLISHED = re.compile(r"step-(\d{8,})")
_PARTIAL, _REPLACED = ".partial", ".replaced"
_LOCK = ".lock"


class Published(NamedTuple):
    """A checkpoint that was published.

    manifest   None where it cannot be read
    why        what is wrong with the checkpoint, as far as can be seen without reading its tensors; "" for nothing
    """

    path: Path
    step: int
    manifest: Manifest | None
    why: str


def name_of(step: int) -> str:
    """The folder of a checkpoint.

    >>> name_of(120)
    'step-00000120'
    """
    return f"step-{step:08d}"


def partial_of(folder: Path, step: int) -> Path:
    """Where a checkpoint is written before it is published."""
    return folder / f".{name_of(step)}{_PARTIAL}"


def published(folder: Path) -> list[Published]:
    """All checkpoints of a folder, the newest first; those that do not tell when they were made come before all."""
    found: list[tuple[float, Published]] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _PUBLISHED.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        manifest, why = _looked_at(path, int(match[1]))
        order = float("inf") if manifest is None else manifest.sequence
        found.append((order, Published(path, int(match[1]), manifest, why)))
    return [one for _, one in sorted(found, key=lambda pair: (pair[0], pair[1].step), reverse=True)]


def _looked_at(path: Path, step: int) -> tuple[Manifest | None, str]:
    """The manifest of a checkpoint, if it can be read, and what is wrong."""
    manifest = None
    try:
        manifest = read_manifest(path)
        if manifest.step != step:
            raise Damaged(f"{path / MANIFEST} is of step {manifest.step}")
        check_sizes(path, manifest)
    except BadInput as error:
        return manifest, str(error)
    return manifest, ""


def why_none(passed_over: Sequence[tuple[Path, str]]) -> str:
    """Why each checkpoint was passed over; where only the folders differ, once for all of them.

    >>> step = Path("step-8"), Path("step-6")
    >>> why_none([(one, f"{one}/manifest.json is of another model") for one in step])
    'step-8/manifest.json is of another model; the same holds of step-6'
    """
    alike: dict[str, list[tuple[Path, str]]] = {}
    for path, why in passed_over:
        alike.setdefault(why.replace(str(path), ""), []).append((path, why))
    told: list[str] = []
    for (_, why), *others in alike.values():
        names = ", ".join(path.name for path, _ in others)
        told.append(f"{why}; the same holds of {names}" if others else why)
    return "; ".join(told)


def next_sequence(folder: Path) -> int:
    """One more than that of any checkpoint that is there."""
    return 1 + max((one.manifest.sequence for one in published(folder) if one.manifest is not None), default=0)


def publish(partial: Path, step: int) -> Path:
    """Give a checkpoint whose files are on disk its name; one of the same step is gone only after that."""
    folder = partial.parent
    target, replaced = folder / name_of(step), folder / f".{name_of(step)}{_REPLACED}"
    sync(partial)
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    partial.rename(target)
    sync(folder)
    if replaced.exists():
        shutil.rmtree(replaced)
    return target


def clear(folder: Path) -> list[str]:
    """Remove what a run left that was cut off while it saved; the names of what was removed."""
    removed: list[str] = []
    for path in sorted(folder.glob(f".step-*{_REPLACED}")):
        target = folder / path.name.removeprefix(".").removesuffix(_REPLACED)
        if target.exists():
            shutil.rmtree(path)
        else:
            path.rename(target)
    for path in sorted(folder.glob(f".step-*{_PARTIAL}")):
        shutil.rmtree(path)
        removed.append(path.name)
    return removed


def prune(folder: Path, keep_last: int, digest: str, refused: Collection[int]) -> None:
    """Remove all but the newest `keep_last` good checkpoints of a model, and damaged ones that are older than those.

    refused   sequences of checkpoints that were found damaged when they were read: they do not count as good
    """
    good = 0
    for one in published(folder):
        if one.manifest is not None and one.manifest.model_digest != digest:
            continue
        if good >= keep_last:
            # out of sight first: a removal that is cut off must not leave half a checkpoint under a name
            gone = folder / f".{one.path.name}{_PARTIAL}"
            one.path.rename(gone)
            shutil.rmtree(gone)
        elif not one.why and one.manifest is not None and one.manifest.sequence not in refused:
            good += 1


def lock(folder: Path) -> IO[bytes]:
    """Keep other runs from saving here until the file is closed or this process ends, however it ends."""
    file = (folder / _LOCK).open("ab")
    try:
        # a lock of the process, not of the file: children that outlive this process do not hold it
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise BadInput(
            f"another run saves its checkpoints in {folder}; wait until it has ended, or name another folder"
        ) from error
    return file


def discard(partial: Path) -> None:
    """Give back the space of a checkpoint that cannot be finished."""
    with suppress(OSError):
        shutil.rmtree(partial)
