"""Saving while training goes on, by PyTorch's distributed checkpoint.

A save in the background speaks to the other ranks from a thread of its own. On the group that training uses, what the
thread says and what training says meet in another order on each rank, and tensors of other sizes are taken for each
other. [torch: distributed/checkpoint/state_dict_saver.py async_save, whose default is the default group] And a save
into a folder that holds a checkpoint destroys that one first: killed halfway, it leaves none. [torch:
distributed/checkpoint/filesystem.py] So saves have a group of their own, one after the other, each in a new folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save

from trainledger.errors import BadInput

Answer = TypeVar("Answer")


class Saver:
    """What saves the states of a job; every rank makes one, and asks it for the same saves at the same points.

    Needs an initialised process group, which the agreement on a folder goes through: it is made by the caller's own
    thread, in order with the rest of training.
    """

    def __init__(self) -> None:
        group = dist.new_group(backend="gloo", group_desc="checkpoint")
        assert isinstance(group, dist.ProcessGroup), "every rank is in it"
        self._group = group
        self._running: Future[object] | None = None

    def save_async(self, state: Mapping[str, Any], folder: Path) -> Future[object]:
        """Start to save a state into a new folder, which must be one that all ranks see.

        The state is copied before this returns, so that training may go on. The checkpoint is whole once every rank's
        future is done; an error of the save is the future's.
        """
        if any(self._told(self._running is not None and not self._running.done())):
            raise BadInput(f"a save is still running, and {folder} would be saved beside it; wait for its result first")
        refusal = next(filter(None, self._told(_make(folder) if dist.get_rank() == 0 else "")), "")
        if refusal:
            raise BadInput(refusal)
        running = async_save(dict(state), checkpoint_id=folder, process_group=self._group)
        assert isinstance(running, Future), "only a stager of the caller's own gives anything else"
        self._running = running
        return running

    @staticmethod
    def _told(own: Answer) -> list[Answer]:
        """What every rank says, on all of them: a rank that started a save alone would wait for the others."""
        every = [own] * dist.get_world_size()
        dist.all_gather_object(every, own)
        return every


def _make(folder: Path) -> str:
    """Make the folder; why it cannot be made, or ""."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return f"{folder} exists, and a save that is cut off there would destroy what it holds; name a new folder"
    except OSError as error:
        return f"{folder} cannot be made ({error.strerror}); name a folder that this process may write to"
    return ""
