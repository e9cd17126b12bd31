"""One save, on the thread of the saver: every rank writes its parts, then the first one publishes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_parts

from trainledger.errors import BadInput
from trainledger.runtime.checkpoint import folders
from trainledger.runtime.checkpoint.manifest import STATE, File, Manifest, write_json, write_manifest
from trainledger.runtime.checkpoint.parts import Part
from trainledger.runtime.checkpoint.saver import Saver
from trainledger.runtime.checkpoint.storage import SavePlanner, Writer


class SaveFailed(BadInput):
    """A checkpoint could not be written and nothing of it is left; or it is whole, and older ones cannot be removed."""


class Save(msgspec.Struct, frozen=True, kw_only=True):
    """What to save.

    parts        this rank's, with values that do not change any more
    state        what is not a tensor, alike on all ranks
    manifest     without its files and its sequence
    generators   of this rank
    refused      sequences of checkpoints that do not count as good
    """

    folder: Path
    step: int
    parts: Sequence[Part]
    state: Mapping[str, Any]
    manifest: Manifest
    generators: Mapping[str, str]
    keep_last: int
    refused: frozenset[int]


class _Done(msgspec.Struct, frozen=True):
    """What a rank has written, or why it has not."""

    files: dict[str, File]
    generators: dict[str, str]
    why: str


def write(save: Save, saver: Saver) -> None:
    """Write a checkpoint and publish it, or raise SaveFailed on every rank."""
    partial, first = folders.partial_of(save.folder, save.step), dist.get_rank() == 0
    refusal = next(filter(None, saver.told(_make(partial) if first else "")), "")
    if refusal:
        raise _failed(save, refusal)
    done = saver.told(_write_parts(save, partial, saver.group))
    why = next((one.why for one in done if one.why), "")
    if first:
        why = why or _publish(save, partial, done)
        if why:
            folders.discard(partial)
    why, *_ = saver.told(why)
    if why:
        raise _failed(save, why)
    why, *_ = saver.told(_prune(save) if first else "")
    if why:
        raise SaveFailed(f"the checkpoint of step {save.step} is saved, and older ones cannot be removed: {why}")


def _failed(save: Save, why: str) -> SaveFailed:
    return SaveFailed(
        f"the checkpoint of step {save.step} was not saved: {why}; those before it are as they were: make room or "
        "correct the folder, or name another one, and resume"
    )


def _make(partial: Path) -> str:
    """Make the folder; why it cannot be made, or ""."""
    try:
        folders.discard(partial)
        partial.mkdir()
    except OSError as error:
        return f"{partial} cannot be made ({error.strerror})"
    return ""


def _write_parts(save: Save, partial: Path, group: dist.ProcessGroup) -> _Done:
    writer = Writer(partial)
    try:
        save_parts({}, storage_writer=writer, planner=SavePlanner(save.parts), process_group=group)
    except CheckpointException as error:
        told = [f"rank {rank} of {group.size()}: {cause}" for rank, (cause, _) in sorted(error.failures.items())]
        return _Done({}, {}, "; ".join(told))
    return _Done(writer.hashing.written, dict(save.generators), "")


def _publish(save: Save, partial: Path, done: Sequence[_Done]) -> str:
    """Finish the folder and give it its name; why that cannot be done, or ""."""
    files = {name: file for one in done for name, file in one.files.items()}
    unseen = [name for name in files if not (partial / name).is_file()]
    if unseen:
        return (
            f"{partial / unseen[0]} was written on another machine and is not seen here; name a folder that all share"
        )
    try:
        content = {**save.state, "step": save.step, "generators": [one.generators for one in done]}
        files[STATE] = write_json(partial / STATE, content)
        sequence = folders.next_sequence(save.folder)
        write_manifest(partial, msgspec.structs.replace(save.manifest, files=files, sequence=sequence))
        folders.publish(partial, save.step)
    except OSError as error:
        return str(error)
    return ""


def _prune(save: Save) -> str:
    """Remove what is too old; why that cannot be done, or ""."""
    try:
        folders.prune(save.folder, save.keep_last, save.manifest.model_digest, save.refused)
    except OSError as error:
        return str(error)
    return ""
