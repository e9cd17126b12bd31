"""`checkpoint verify`: every file of checkpoints read against what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from trainledger.errors import BadInput
from trainledger.runtime.checkpoint.folders import name_of, published
from trainledger.runtime.checkpoint.manifest import Manifest, verify
from trainledger.service.requests import INPUT, flag

PATH = flag("A run folder, its checkpoints, or the folder of one checkpoint.", "PATH", group=INPUT, positional=True)
STEP = "step-"


class Request(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """Read checkpoints whole and say which are as they were written."""

    path: Annotated[str, PATH]


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint; `why` says what is wrong with it, and what else is said is then not known."""

    path: str
    step: int | None
    model: str
    precision: str
    optimizer: str
    bytes: int
    why: str


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """All of them, the newest first."""

    checkpoints: tuple[Verified, ...]

    @property
    def exit_code(self) -> int:
        """1 where one is damaged."""
        return int(any(one.why for one in self.checkpoints))


def run(request: Request) -> Response:
    """Verify one after the other."""
    return Response(checkpoints=tuple(_verified(path) for path in found(Path(request.path))))


def found(path: Path) -> list[Path]:
    """The checkpoints that a path stands for, the newest first."""
    for folder in (path / "checkpoints", path):
        if several := published(folder):
            return [one.path for one in several]
    if not (path.is_dir() and path.name.startswith(STEP)) and not (path / "manifest.json").is_file():
        raise BadInput(f"{path} has no checkpoint; name a run folder, or a folder such as checkpoints/step-00000120")
    return [path]


def _check_name(path: Path, manifest: Manifest) -> None:
    """A folder with the name of another step is one that a run passes over."""
    named = name_of(manifest.step)
    if path.name.startswith(STEP) and path.name != named:
        raise BadInput(f"{path} is the checkpoint of step {manifest.step}, and no run goes on from it; name it {named}")


def _verified(path: Path) -> Verified:
    try:
        manifest = verify(path)
        _check_name(path, manifest)
    except BadInput as error:
        return Verified(path=str(path), step=None, model="", precision="", optimizer="", bytes=0, why=str(error))
    return Verified(
        path=str(path),
        step=manifest.step,
        model=manifest.model,
        precision=manifest.precision,
        optimizer=manifest.optimizer,
        bytes=sum(file.bytes for file in manifest.files.values()),
        why="",
    )
