"""What a checkpoint consists of and what it is of, checked against the files: manifest.json and its seal."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from trainledger.errors import BadInput

MANIFEST, STATE = "manifest.json", "state.json"
FORMAT = 1
"""Of the folder. A release that writes another one must still read this one."""


class Damaged(BadInput):
    """A checkpoint that is not as it was written; the message names the file."""


class File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size and SHA-256 of a file, taken from what was written, not from what could be read afterwards."""

    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint is.

    step        optimizer steps that were taken
    sequence    counts the checkpoints of a folder: the newest has the highest, whatever its step
    model       name and `model_digest` (see `identity`) of what was trained
    states      what the optimizer keeps of a parameter, such as exp_avg
    layout      the row of a Plans that it was saved under
    """

    format: int
    step: int
    sequence: int
    model: str
    model_digest: str
    precision: str
    optimizer: str
    states: tuple[str, ...]
    layout: dict[str, int]
    versions: dict[str, str]
    files: dict[str, File]


def write_json(path: Path, content: object) -> File:
    """Write a file that is on disk when this returns; its size and hash."""
    encoded = json.dumps(content, indent=1, sort_keys=True).encode()
    with path.open("xb") as file:
        file.write(encoded)
        file.flush()
        os.fsync(file.fileno())
    return File(bytes=len(encoded), sha256=hashlib.sha256(encoded).hexdigest())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json, sealed with the hash of its own content."""
    content: dict[str, Any] = msgspec.to_builtins(manifest)
    write_json(folder / MANIFEST, {"manifest": content, "sha256": _seal(content)})


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint; Damaged where it is not there, not whole or not as it was written."""
    path = folder / MANIFEST
    try:
        _size_of(path)
        sealed = json.loads(path.read_bytes())
        content, seal = sealed["manifest"], sealed["sha256"]
        if seal != _seal(content):
            raise Damaged(f"{path} is not as it was written (its SHA-256 differs)")
        if isinstance(content, dict) and content.get("format") != FORMAT:
            raise BadInput(
                f"{path} has format {content.get('format')} and this release reads {FORMAT}; "
                "use the release that wrote it"
            )
        manifest = msgspec.convert(content, Manifest)
    except OSError as error:
        raise Damaged(f"{path} cannot be read ({error.strerror})") from error
    except KeyError as error:
        raise Damaged(f"{path} is not a manifest (it has no {error})") from error
    except (ValueError, TypeError, RecursionError, msgspec.ValidationError) as error:
        raise Damaged(f"{path} is not a manifest ({error})") from error
    for name in manifest.files:
        if name != Path(name).name or name in ("", ".", ".."):
            raise Damaged(f"{path} names the file {name!r}, which is not one beside it")
    return manifest


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Every file is there and as long as it was written; quick, for nothing is read."""
    for name, file in manifest.files.items():
        path = folder / name
        try:
            found = _size_of(path)
        except OSError as error:
            raise Damaged(f"{path} is missing or cannot be looked at ({error.strerror})") from error
        if found != file.bytes:
            raise Damaged(f"{path} has {found} B and was written with {file.bytes} B")


def check_hashes(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """These files have the content that was written."""
    for name in names:
        path = folder / name
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256")
        except OSError as error:
            raise Damaged(f"{path} cannot be read ({error.strerror})") from error
        if found.hexdigest() != manifest.files[name].sha256:
            raise Damaged(f"{path} is not as it was written (its SHA-256 differs)")


def verify(folder: Path) -> Manifest:
    """Read all of a checkpoint against its manifest; Damaged names the first file that is not as it was written."""
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    check_hashes(folder, manifest, manifest.files)
    return manifest


def _size_of(path: Path) -> int:
    """The size of a file in bytes; a pipe or a device that stands in its place would be read without end."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise Damaged(f"{path} is no regular file")
    return found.st_size


def _seal(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
