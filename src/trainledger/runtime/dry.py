"""A dry run: one rank of any plan at full size, in one process, with tensors that have shapes and no memory.

The program is the one that trains. Its process group is PyTorch's fake one, which answers at once and sends nothing;
its tensors are fake, so that a step of a 70B model takes a minute of bookkeeping and hardly any memory.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist

# private: nothing public says what a fake operation gives
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from trainledger.plans.ranks import world_size
from trainledger.runtime.observe.observation import Observation
from trainledger.runtime.progress import Progress
from trainledger.runtime.run import run
from trainledger.runtime.spec import RunSpec


def dry_run(spec: RunSpec, rank: int, progress: Progress) -> Observation:
    """What `rank` would see of a run of `spec`; needs a process without a process group."""
    dist.init_process_group("fake", rank=rank, world_size=world_size(spec.plan), store=FakeStore())
    try:
        with _real_meshes(), _waits_in_place():
            # biases and rotary tables of a fake model may be made of real numbers
            return run(spec, progress, fake=FakeTensorMode(allow_non_fake_inputs=True))
    finally:
        dist.destroy_process_group()


@contextmanager
def _real_meshes() -> Generator[None]:
    """Let FSDP2 join its mesh with that of tensor parallelism with real numbers: it looks ranks up in a tensor."""
    joined: Callable[..., DeviceMesh] = DeviceMesh._concatenate

    def outside(meshes: list[DeviceMesh]) -> DeviceMesh:
        with unset_fake_temporarily(), _disable_current_modes(), torch.device("cpu"):
            return joined(meshes)

    DeviceMesh._concatenate = staticmethod(outside)  # pyright: ignore[reportAttributeAccessIssue]  # for a while
    try:
        yield
    finally:
        DeviceMesh._concatenate = staticmethod(joined)  # pyright: ignore[reportAttributeAccessIssue]  # as it was


@contextmanager
def _waits_in_place() -> Generator[None]:
    """Let a wait give the tensor that it waits for, as it does where there is a backend; a fake one would be new."""

    def given(mode: object, func: object, tensor: torch.Tensor) -> torch.Tensor:
        del mode, func
        return tensor

    wait = torch.ops._c10d_functional.wait_tensor.default
    assert wait not in op_implementations_dict, "nobody else has said what a fake wait is"
    op_implementations_dict[wait] = given
    try:
        yield
    finally:
        del op_implementations_dict[wait]
