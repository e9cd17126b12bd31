"""How PyTorch's distributed checkpoint writes and reads here: hashed as it is written, and nothing is executed.

PyTorch pickles its index, and reads it back with a pickle that may call anything. A checkpoint can come from anywhere,
and a hash in a manifest that lies beside it proves nothing about who made it. So the index is read by an unpickler that
knows the classes of an index alone; tensors are read with `weights_only`; and entries that are no tensors, which
PyTorch would unpickle whatever they are, are refused. [torch: distributed/checkpoint/filesystem.py read_metadata,
default_planner.py load_bytes]
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import pickle
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.metadata import TensorStorageMetadata as Stored
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner import SavePlanner as SavePlannerBase
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trainledger.runtime.checkpoint.manifest import Damaged, File, Manifest
from trainledger.runtime.checkpoint.parts import Part

INDEX = ".metadata"

_INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool"),
}
"""All that an index names: data classes, sizes, dtypes, and the function that looks a layout up by its name."""


class HashedFile(io.IOBase):
    """A file that is written once from front to back, and hashed on the way.

    failed   the first error of the disk, which names the file
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failed: OSError | None = None
        self._file = path.open("xb")
        self._hash = hashlib.sha256()
        self._bytes = 0

    def write(self, data: Any) -> int:  # noqa: ANN401  # anything with a buffer
        """Append."""
        with self._naming():
            self._file.write(data)
        self._hash.update(data)
        size = memoryview(data).nbytes
        self._bytes += size
        return size

    def tell(self) -> int:
        """Bytes so far."""
        return self._bytes

    def flush(self) -> None:
        """Hand on what is buffered."""
        if not self._file.closed:
            with self._naming():
                self._file.flush()

    def fileno(self) -> int:
        """For fsync, which reaches only what is not buffered here."""
        self.flush()
        return self._file.fileno()

    def close(self) -> None:
        """Close the file; more than once is no error."""
        with self._naming():
            self._file.close()
        super().close()

    @property
    def written(self) -> File:
        """Size and hash of all that was written."""
        return File(bytes=self._bytes, sha256=self._hash.hexdigest())

    @contextmanager
    def _naming(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            number = error.errno if error.errno is not None else errno.EIO
            named = OSError(number, os.strerror(number), str(self.path))
            self.failed = self.failed or named
            raise named from error


class HashingFileSystem(FileSystem):
    """Files of a checkpoint that is written; `written` is what became of each, by name, `failed` the first error."""

    def __init__(self) -> None:
        self.written: dict[str, File] = {}
        self.failed: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        """Open a file for writing."""
        assert mode == "wb", "a writer only writes"
        stream = HashedFile(Path(path))
        try:
            yield stream
        except Exception:
            self.failed = self.failed or stream.failed
            raise
        finally:
            stream.close()
        self.written[Path(path).name] = stream.written

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """The index is written under another name first."""
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class Writer(FileSystemWriter):
    """Writes one rank's parts into one file, which is on disk before the index is made."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True, thread_count=1, overwrite=False)
        self.hashing = HashingFileSystem()
        self.fs = self.hashing

    def write_data(self, plan: SavePlan, planner: SavePlannerBase) -> Future[list[WriteResult]]:
        """Write this rank's parts; where the disk fails, its error is raised.

        The archive that was being written wants to end itself, finds itself broken, and says that instead.
        [torch: serialization.py _open_zipfile_writer]
        """
        try:
            return super().write_data(plan, planner)
        except Exception:
            if self.hashing.failed is not None:
                raise self.hashing.failed from None
            raise

    def storage_meta(self) -> StorageMeta:
        """Nothing of this machine's paths."""
        return StorageMeta(save_id=self.save_id)


class SavePlanner(DefaultSavePlanner):
    """Plans what this rank writes of its parts; the coordinator leaves each box to one of those who hold it."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = {part.key: part for part in parts}

    def create_local_plan(self) -> SavePlan:
        """One item for each part."""
        self.plan = SavePlan([_write_item(part) for part in self._parts.values()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The values to write."""
        return self._parts[index.fqn].values


def _write_item(part: Part) -> WriteItem:
    data = TensorWriteData(
        chunk=part.box.chunk,
        properties=TensorProperties(dtype=part.values.dtype),
        size=torch.Size(part.box.whole),
    )
    return WriteItem(MetadataIndex(part.key, part.box.offsets), WriteItemType.SHARD, tensor_data=data)


class Reader(FileSystemReader):
    """Reads a checkpoint whose manifest has been read."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder)
        self.index = read_index(folder, manifest)

    def read_metadata(self) -> Metadata:  # pyright: ignore[reportIncompatibleMethodOverride]  # there is one index, of no rank
        """The index."""
        return self.index


class LoadPlanner(DefaultLoadPlanner):
    """Plans what is read into this rank's parts; each must be covered by what was written."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = {part.key: part for part in parts}

    def set_up_planner(
        self,
        state_dict: Mapping[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the index; what is loaded into is known already."""
        assert not state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Items for the boxes that meet those of this rank."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for part in self._parts.values():
            stored = self.metadata.state_dict_metadata[part.key]
            assert isinstance(stored, Stored)
            found = create_read_items_for_chunk_list(part.key, stored, [part.box.chunk])
            covered = sum(item.lengths.numel() for item in found)
            if covered != part.values.numel():
                raise Damaged(
                    f"{INDEX} has {covered} of the {part.values.numel()} elements of {part.key} that are needed"
                )
            items += found
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Nothing but tensors is loaded: PyTorch would unpickle these bytes, whatever they are."""
        raise AssertionError(f"{read_item.dest_index.fqn} is no tensor but {len(value.getbuffer())} B")

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """What to read into."""
        return self._parts[index.fqn].values


class _Unpickler(pickle.Unpickler):
    """Knows the classes of an index alone."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:  # noqa: ANN401  # as in pickle
        """One of those, or no index."""
        if global_name not in _INDEX_CLASSES.get(module_name, ()):
            raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which no index does")
        return super().find_class(module_name, global_name)


def read_index(folder: Path, manifest: Manifest) -> Metadata:
    """PyTorch's index of a checkpoint: only tensors, in files that the manifest lists."""
    path = folder / INDEX
    if INDEX not in manifest.files:
        raise Damaged(f"{folder / 'manifest.json'} lists no {INDEX}")
    index = _unpickled(path)
    if not isinstance(index, Metadata) or not isinstance(index.state_dict_metadata, dict):
        raise Damaged(f"{path} is no index of a checkpoint")
    for key, stored in index.state_dict_metadata.items():
        if not isinstance(key, str) or not isinstance(stored, Stored):
            raise Damaged(f"{path}: {key!r} is no tensor")
    places: object = index.storage_data
    if not isinstance(places, dict):
        raise Damaged(f"{path} does not say where its tensors are")
    for place in places.values():
        if getattr(place, "relative_path", None) not in manifest.files:
            raise Damaged(
                f"{path} places tensors in {getattr(place, 'relative_path', place)!r}, which the manifest lacks"
            )
        if getattr(place, "transform_descriptors", None):
            raise Damaged(f"{path} has transformed tensors, which are never written here")
    return index


def _unpickled(path: Path) -> object:
    load: Callable[[], object]
    try:
        with path.open("rb") as file:
            load = _Unpickler(file).load
            return load()
    except OSError as error:
        raise Damaged(f"{path} cannot be read ({error.strerror})") from error
    except Exception as error:  # a damaged pickle may raise anything
        raise Damaged(f"{path} cannot be read as an index ({error})") from error
