"""What saves beside training: a thread with a process group of its own, and host memory that it saves from.

A save in the background speaks to the other ranks from a thread of its own. On the group that training uses, what the
thread says and what training says meet in another order on each rank, and tensors of other sizes are taken for each
other. [torch: distributed/checkpoint/state_dict_saver.py async_save, whose default is the default group] And a save
into a folder that holds a checkpoint destroys that one first: killed halfway, it leaves none. [torch:
distributed/checkpoint/filesystem.py] So saves have a group of their own, one after the other, each in a new folder.

The training thread is held up by the copy to host memory and by nothing else: it asks no other rank anything. PyTorch's
own stagers copy into new memory each time, or keep pinned memory that only a CUDA device has a use for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainledger.runtime.checkpoint.parts import Part

Answer = TypeVar("Answer")


class Saver:
    """Runs the saves of a rank, one at a time; every rank makes one and asks for the same saves in the same order.

    group   all ranks of the job, for what saves and loads say to each other
    """

    def __init__(self) -> None:
        group = dist.new_group(backend="gloo", group_desc="checkpoint")
        assert isinstance(group, dist.ProcessGroup), "every rank is in it"
        self.group = group
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: Future[object] | None = None

    def start(self, save: Callable[[], object]) -> None:
        """Run a save in the background; one that is still running is waited for, and its error raised, first."""
        self.wait()
        self._running = self._thread.submit(save)

    def wait(self) -> None:
        """Until the save is done; its error is raised here, once."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Wait, and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def told(self, own: Answer) -> list[Answer]:
        """What every rank says, on all of them."""
        every = [own] * self.group.size()
        dist.all_gather_object(every, own, group=self.group)
        return every


class Staging:
    """Host memory that is copied into and saved from: made at the first copy, kept for those that follow."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def copy(self, parts: Sequence[Part]) -> list[Part]:
        """The same parts with values that training does not touch."""
        staged = [part._replace(values=self._room(part)) for part in parts]
        for part, copied in zip(parts, staged, strict=True):
            copied.values.copy_(part.values, non_blocking=True)
        if any(part.values.is_cuda for part in parts):
            torch.cuda.synchronize()
        return staged

    def _room(self, part: Part) -> Tensor:
        held = self._held.get(part.key)
        if held is None or held.shape != part.values.shape or held.dtype != part.values.dtype:
            held = torch.empty_like(part.values, device="cpu", pin_memory=part.values.is_cuda)
            self._held[part.key] = held
        return held
