"""A checkpoint as the Hugging Face Hub holds models: safetensors and config.json, made without a process group."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_parts

from trainledger.errors import BadInput
from trainledger.runtime.checkpoint.folders import published
from trainledger.runtime.checkpoint.manifest import STATE, Damaged, Manifest, verify, write_json
from trainledger.runtime.checkpoint.parts import WEIGHTS, Box, Part
from trainledger.runtime.checkpoint.storage import LoadPlanner, Reader
from trainledger.runtime.files import sync
from trainledger.runtime.model.weights import save_safetensors, split_stack

FILE_BYTES = 5_000_000_000
"""The most that one file of weights holds, unless a single tensor is larger. [transformers: modeling_utils.py]"""

_DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Dtype = Literal["float32", "bfloat16", "float16"]


def export(checkpoint: Path, out: Path, *, dtype: Dtype = "float32", file_bytes: int = FILE_BYTES) -> list[Path]:
    """Write the weights of a checkpoint into a new folder; the files of it.

    checkpoint   a step's folder, or the folder of a run's checkpoints, whose newest is taken
    dtype        of the weights that are written; they are kept in float32

    All of the checkpoint is verified first. Host memory holds one file's weights at a time.
    """
    if out.exists():
        raise BadInput(f"{out} exists; name a new folder for the exported model")
    folder = _one(checkpoint)
    reader = Reader(folder, _whole(folder))
    config: dict[str, Any] = json.loads((folder / STATE).read_bytes())["config"]
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _write_weights(reader, partial, dtype, file_bytes)
        write_json(partial / "config.json", {**config, "torch_dtype": dtype})
        sync(partial)
        partial.rename(out)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise BadInput(f"{out} cannot be written ({error}); make room, or name another folder") from error
    return sorted(out.iterdir())


def _one(checkpoint: Path) -> Path:
    """The folder of one step."""
    if not checkpoint.is_dir():
        raise BadInput(f"{checkpoint} is no folder; name a checkpoint, or the folder of a run's checkpoints")
    newest = next(iter(published(checkpoint)), None)
    return checkpoint if newest is None else newest.path


def _whole(folder: Path) -> Manifest:
    """Its manifest, after all of it was read; one that is damaged is refused with the newest that may be taken."""
    try:
        return verify(folder)
    except Damaged as error:
        others = (one.path for one in published(folder.parent) if one.path != folder and not one.why)
        other = next(others, None)
        advice = "no other one is beside it" if other is None else f"export {other} in its place"
        raise Damaged(f"{error}; {advice}") from error


def _write_weights(reader: Reader, out: Path, dtype: Dtype, file_bytes: int) -> None:
    """One file, or several and an index of them."""
    sizes = {
        key: stored.size
        for key, stored in reader.index.state_dict_metadata.items()
        if key.startswith(WEIGHTS) and isinstance(stored, TensorStorageMetadata)
    }
    files = list(_in_files(sizes, _DTYPES[dtype].itemsize, file_bytes))
    where: dict[str, str] = {}
    total_bytes = 0
    for index, keys in enumerate(files, 1):
        name = "model.safetensors" if len(files) == 1 else f"model-{index:05d}-of-{len(files):05d}.safetensors"
        tensors = _weights(reader, {key: sizes[key] for key in keys}, _DTYPES[dtype])
        save_safetensors(tensors, out / name)
        where |= {single: name for stack, tensor in tensors.items() for single, _ in split_stack(stack, tensor)}
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if len(files) > 1:
        write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": total_bytes}, "weight_map": where})


def _in_files(sizes: Mapping[str, torch.Size], itemsize: int, file_bytes: int) -> Iterator[list[str]]:
    """Keys in groups of at most so many bytes, or of one."""
    held: list[str] = []
    held_bytes = 0
    for key, size in sizes.items():
        amount = size.numel() * itemsize
        if held and held_bytes + amount > file_bytes:
            yield held
            held, held_bytes = [], 0
        held.append(key)
        held_bytes += amount
    yield held


def _weights(reader: Reader, sizes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Whole tensors by the names of the state dict."""
    parts = [
        Part(key, Box((0,) * len(size), tuple(size), tuple(size)), torch.empty(tuple(size)))
        for key, size in sizes.items()
    ]
    with warnings.catch_warnings():
        # that it reads in a single process is what is meant
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load_parts({}, storage_reader=reader, planner=LoadPlanner(parts), no_dist=True)
    return {part.key.removeprefix(WEIGHTS): part.values.to(dtype) for part in parts}
