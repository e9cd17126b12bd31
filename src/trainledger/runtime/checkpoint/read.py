"""One load: verify by all ranks together, compare with the program, then read each rank's boxes."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as load_parts

from trainledger.errors import BadInput
from trainledger.runtime.checkpoint import folders
from trainledger.runtime.checkpoint.identity import other_keys, other_states
from trainledger.runtime.checkpoint.manifest import MANIFEST, STATE, Manifest, check_hashes, check_sizes, read_manifest
from trainledger.runtime.checkpoint.parts import SCALES, WEIGHTS, Part, make_states, parts_of, states_of
from trainledger.runtime.checkpoint.saver import Saver
from trainledger.runtime.checkpoint.storage import INDEX, LoadPlanner, Reader
from trainledger.runtime.program import Program


class Candidate(msgspec.Struct, frozen=True):
    """A checkpoint that may be loaded; `why` says what is already known to be wrong with it."""

    path: Path
    manifest: Manifest | None
    why: str


def candidates(folder: Path, which: Path | None) -> list[Candidate]:
    """The checkpoints of a folder, the newest first, or the one that is named."""
    if which is None:
        return [Candidate(one.path, one.manifest, one.why) for one in folders.published(folder)]
    try:
        manifest = read_manifest(which)
        check_sizes(which, manifest)
    except BadInput as error:
        return [Candidate(which, None, str(error))]
    return [Candidate(which, manifest, "")]


def read(one: Candidate, program: Program, digest: str, saver: Saver) -> str:
    """Load a checkpoint into a program, after all ranks have found it good; else why not, alike on all ranks.

    The program is touched only once nothing is left that could be wrong, unless a disk fails between two looks.
    """
    if one.why or one.manifest is None:
        return one.why
    why = _first(saver, _verified(one.path, one.manifest, dist.get_rank(), dist.get_world_size()))
    if why:
        return why
    fresh = not program.optimizer.state
    make_states(program)
    why = _filled(one.path, one.manifest, program, digest, saver)
    if (why and fresh) or not one.manifest.states:
        # those that were made to be filled, and were not
        program.optimizer.state.clear()
    return why


def _filled(folder: Path, manifest: Manifest, program: Program, digest: str, saver: Saver) -> str:
    """Read a checkpoint whose files are as they were written; why it is none of this program, else ""."""
    parts, why = parts_of(program), ""
    if manifest.step == 0 and not manifest.states:
        # saved before the first step made any
        parts = [part for part in parts if part.key.startswith(WEIGHTS)]
    reader: Reader | None = None
    try:
        reader = Reader(folder, manifest)
        parts = [part for part in parts if SCALES not in part.key or part.key in reader.index.state_dict_metadata]
        why = _differs(folder, manifest, reader.index, program, parts, digest)
    except BadInput as error:
        why = str(error)
    why = _first(saver, why)
    if why or reader is None:
        return why
    try:
        with torch.no_grad():
            load_parts({}, storage_reader=reader, planner=LoadPlanner(parts), process_group=saver.group)
            for part in parts:
                part.put_back(scaled=part.scales in reader.index.state_dict_metadata)
        program.precision.weights_changed()
    except CheckpointException as error:
        return "; ".join(f"rank {rank}: {folder}: {cause}" for rank, (cause, _) in sorted(error.failures.items()))
    return ""


def _first(saver: Saver, own: str) -> str:
    """What the first rank that has something to say says."""
    return next(filter(None, saver.told(own)), "")


def _verified(folder: Path, manifest: Manifest, rank: int, ranks: int) -> str:
    """What is wrong with this rank's share of the files."""
    try:
        check_hashes(folder, manifest, sorted(manifest.files)[rank::ranks])
    except BadInput as error:
        return str(error)
    return ""


def _differs(
    folder: Path, manifest: Manifest, index: Metadata, program: Program, parts: list[Part], digest: str
) -> str:
    """Why a good checkpoint is not one of this program."""
    spec, stored = program.spec, index.state_dict_metadata
    other = f"{folder / MANIFEST}: it is a checkpoint of {manifest.model}"
    for part in parts:
        if not part.key.startswith(WEIGHTS):
            continue
        name = part.key.removeprefix(WEIGHTS)
        if part.key not in stored:
            return f"{other}, which has no {name}, and not of this {spec.model.name}"
        size = tuple(stored[part.key].size)  # pyright: ignore[reportAttributeAccessIssue]  # the reader lets tensors pass
        if size != part.box.whole:
            return f"{other} whose {name} is {list(size)}, and not of this {spec.model.name}: {list(part.box.whole)}"
    if manifest.model_digest != digest:
        config = json.loads((folder / STATE).read_bytes())["config"]
        what = other_keys(config, spec.config) or "the tensors of other layers"
        return f"{other} that is not this {spec.model.name}: {what}"
    kept = other_states(folder / MANIFEST, manifest, spec.optimizer, states_of(program))
    if kept:
        return kept
    missing = [part.key for part in parts if part.key not in stored]
    return f"{folder / INDEX} has no {missing[0]}" if missing else ""
