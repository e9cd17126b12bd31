"""`checkpoint export`: the weights of a checkpoint as the Hugging Face Hub holds models."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from trainledger.errors import BadInput
from trainledger.service.checkpoint_verify import PATH, found
from trainledger.service.requests import INPUT, flag


class Request(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """Write safetensors and config.json into a new folder; of several checkpoints the newest, which must be whole."""

    path: Annotated[str, PATH]
    out: Annotated[str, flag("The folder, which must not be there yet.", "OUT", group=INPUT, positional=True)]
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, flag("Of the weights that are written [float32].")
    ] = None


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """What was written, and from where."""

    path: str
    files: tuple[str, ...]
    bytes: int

    @property
    def exit_code(self) -> int:
        """It was written."""
        return 0


def run(request: Request) -> Response:
    """Verify, then write."""
    if importlib.util.find_spec("torch") is None:
        raise BadInput("a checkpoint is read by PyTorch, and torch is not installed; pip install 'trainledger[train]'")
    from trainledger.runtime.checkpoint.export import export

    checkpoint = found(Path(request.path))[0]
    files = export(checkpoint, Path(request.out), dtype=request.dtype or "float32")
    return Response(
        path=str(checkpoint), files=tuple(map(str, files)), bytes=sum(file.stat().st_size for file in files)
    )
