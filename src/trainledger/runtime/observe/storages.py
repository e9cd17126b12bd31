"""Every storage that is alive on a rank, from its birth to its death: what it holds, and where it came from.

A storage is met when an operation gives a tensor that lies on it, views included, and so once however many tensors
share it. Its death is exact: PyTorch keeps one Python object per storage for as long as the storage lives, so the weak
reference to that object calls back when the memory is freed, whoever freed it. Storages are resized without any
operation (FSDP2 empties a gathered unit so), hence `UntypedStorage.resize_` is watched as well.

What an operation allocates and frees again before it returns is not seen: a peak is one between operations. Neither is
what a backend works on, but for the copy that gloo makes of what it reduces and scatters, of which it takes views while
the program waits: that is known, and not part of a peak, for a thread of gloo lets go of it at a time of its own. So it
does of what it was given, a moment after it reports that all is done: before more is alive than ever before, that
moment is waited for. [torch: csrc/distributed/c10d/ProcessGroupGloo.cpp reduce_scatter_tensor_coalesced, runLoop]

While any dispatch mode is active autograd adds gradients that meet into a new tensor instead of into the first one, so
a watched peak can exceed an unwatched one by the largest of them. [torch: csrc/autograd/input_buffer.cpp,
can_accumulate_inplace; ATen/TensorSubclassLikeUtils.h]
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from trainledger.lines import line_id
from trainledger.runtime.observe.clock import Clock
from trainledger.runtime.observe.dispatch import After
from trainledger.runtime.observe.tensors import local_part, tensors_in

ADOPTED = "before watching"
"""The birth of a storage that no watched operation made."""

COMMUNICATION = frozenset({"c10d", "_c10d_functional", "_dtensor", "symm_mem"})
"""Namespaces of the operations that hand tensors to a backend."""

REDUCE_SCATTER, SPLIT = "c10d::_reduce_scatter_base_", "aten::split.Tensor"
"""What gloo is asked, and what it does to its copy of what it was given, which is first seen so."""


MOMENTS, MOMENT_S = 4, 0.0005
"""How often and for how long to look again whether a thread of a backend has let go of anything."""


class Ref(weakref.ref[torch.UntypedStorage]):
    """A weak reference that knows the address of its storage, which is the key to it while it lives."""

    __slots__ = ("key",)
    key: int


@dataclasses.dataclass(slots=True)
class Storage:
    """A live storage.

    dtype, shape   of the first tensor seen on it
    label          (category, name) of the birth, where it was given one
    group          the group it is summed in
    sent           whether it was ever handed to a backend, whose threads may hold it a moment longer than its owner
    inner          it is a backend's own
    bytes          0 on the meta device, where a tensor has a size and no memory
    """

    ref: Ref
    op: str
    phase: str
    dtype: torch.dtype
    shape: torch.Size
    label: tuple[str, str] | None
    group: str | None = None
    sent: bool = False
    inner: bool = False
    bytes: int = 0


class StorageTracker:
    """A watcher that knows all live storages, their bytes now, and the most there were since the last mark."""

    def __init__(self, clock: Clock) -> None:
        self.live: dict[int, Storage] = {}
        self.current_bytes = 0
        self.peak_bytes = 0
        self._marked = False
        self._clock = clock
        self._label: tuple[str, str] | None = None
        # what the last reduce-scatter took, in bytes
        self._reduced = 0
        # Appended to by whichever thread frees a storage (gloo's among them), emptied by the one that watches.
        self._dead: deque[Ref] = deque()
        self._died = cast("Callable[[weakref.ref[torch.UntypedStorage]], None]", self._dead.append)
        self._group_bytes: dict[str, int] = {}
        self._group_peak: dict[str, int] = {}

    def after(self, func: OpOverload) -> After:
        """Meet the storages of what `func` gives."""
        op, meet = func.name(), self._meet

        def after(_args: tuple[Any, ...], _kwargs: dict[str, Any], out: object) -> None:
            if isinstance(out, torch.Tensor):
                meet(out, op)
            else:
                for tensor in tensors_in(out):
                    meet(tensor, op)

        def after_sending(args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
            tensors = tuple(tensors_in((args, *kwargs.values(), out)))
            handed = [meet(tensor, op) for tensor in tensors]
            for tensor, storage in zip(tensors, handed, strict=True):
                storage.sent = not isinstance(tensor, FakeTensor)
            if op == REDUCE_SCATTER:
                self._reduced = max(storage.bytes for storage in handed)

        return after_sending if func.namespace in COMMUNICATION else after

    def adopt(self, tensors: Iterable[torch.Tensor], op: str = ADOPTED) -> None:
        """Know storages that were born unwatched."""
        for tensor in tensors:
            self._meet(local_part(tensor), op)

    def storage_of(self, tensor: torch.Tensor) -> Storage:
        """The storage under a local tensor."""
        return self._meet(tensor, ADOPTED)

    def _meet(self, tensor: torch.Tensor, op: str) -> Storage:
        storage = tensor.untyped_storage()
        if self._dead:  # one of them may have had the address of this one
            self.bury()
        known = self.live.get(storage._cdata)  # the address, which is what a storage is told apart by
        if known is None:
            return self._born(tensor, storage, op)
        if (size := storage.nbytes()) != known.bytes:
            self._resize(known, size)
        return known

    def _born(self, tensor: torch.Tensor, storage: torch.UntypedStorage, op: str) -> Storage:
        ref = Ref(storage, self._died)
        ref.key = storage._cdata
        inner = op == SPLIT and storage.nbytes() == self._reduced
        phase = self._clock.current
        born = Storage(ref, op, phase, tensor.dtype, tensor.shape, self._label, sent=inner, inner=inner)
        self.live[ref.key] = born
        if not tensor.is_meta:
            self._resize(born, storage.nbytes())
        return born

    def _resize(self, known: Storage, size: int) -> None:
        self.current_bytes += 0 if known.inner else size - known.bytes
        if self.current_bytes > self.peak_bytes:
            self._settle()
            self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        if known.group is not None:
            self._sum(known.group, size - known.bytes)
        known.bytes = size

    def _settle(self) -> None:
        """Wait until what was sent is gone, or is there to stay."""
        if not self._marked or not any(storage.sent for storage in self.live.values()):
            return
        for _ in range(MOMENTS):
            time.sleep(MOMENT_S)
            self.bury()
            if self.current_bytes <= self.peak_bytes:
                return

    def _sum(self, group: str, change: int) -> None:
        now = self._group_bytes[group] = self._group_bytes.get(group, 0) + change
        self._group_peak[group] = max(self._group_peak.get(group, 0), now)

    def bury(self) -> None:
        """Take off the storages that died since the last look."""
        while self._dead:
            self._resize(self.live.pop(self._dead.popleft().key), 0)

    @contextmanager
    def following_resizes(self) -> Generator[None]:
        """See what `UntypedStorage.resize_` does, which is no operation that a mode is shown."""
        resize = torch.UntypedStorage.resize_

        def resize_and_tell(storage: torch.UntypedStorage, size: int) -> object:
            self.bury()
            answer = resize(storage, size)
            if (known := self.live.get(storage._cdata)) is not None:
                self._resize(known, storage.nbytes())
            return answer

        torch.UntypedStorage.resize_ = resize_and_tell  # pyright: ignore[reportAttributeAccessIssue]  # for a while
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # pyright: ignore[reportAttributeAccessIssue]  # as it was

    @contextmanager
    def labelled(self, category: str, name: str) -> Generator[None]:
        """Label what is born within: where no tensor claims it, it is `held/<category>/<name>`.

        For what no tensor of a program names, as the buckets that DDP's reducer makes in C++: operations there go
        through the dispatcher too, and so are seen.
        """
        outer, self._label = self._label, (category, name)
        try:
            yield
        finally:
            self._label = outer

    def group(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """Sum the storages of these tensors from now on, as one group: `gathered` has its largest sum."""
        for tensor in tensors:
            member = self.storage_of(local_part(tensor))
            if member.group is None:
                member.group = name
                self._sum(name, member.bytes)

    @property
    def gathered(self) -> dict[str, int]:
        """The largest sum of each group since the last mark, by line id."""
        return {line_id("held", "gathered", name): most for name, most in self._group_peak.items()}

    def mark(self) -> None:
        """Peaks are counted from here."""
        self._marked = True
        self.bury()
        self.peak_bytes = self.current_bytes
        self._group_peak = dict(self._group_bytes)
