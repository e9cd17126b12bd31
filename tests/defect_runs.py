"""What ranks do in the tests of PyTorch's defects: the same work with PyTorch alone, and with what works around it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from trainledger.errors import BadInput
from trainledger.runtime.checkpoint.saver import Saver
from trainledger.runtime.observe.tensors import local_part
from trainledger.runtime.precision.scaling import WorldScaler
from trainledger.runtime.program import Program, Stepped
from trainledger.runtime.spec import RunSpec
from trainledger.runtime.world import World

CPU = torch.device("cpu")
SCALE = 8.0


class Scaling(NamedTuple):
    """A step of SGD at rate 1 with gradients of SCALE, of which the last has an infinity on rank `bad`.

    layouts   of each parameter: "whole", "cut" over the ranks, or "plain" for a tensor that is one rank's alone
    ours      whether the scaler is; else it is PyTorch's
    """

    layouts: tuple[str, ...]
    bad: int | None
    ours: bool


class Scaled(NamedTuple):
    """What one rank sees: its part of each weight, which began at zero, and the scale after the step."""

    weights: list[list[float]]
    scale: float


def scaled(rank: int, steps: list[Scaling]) -> list[Scaled]:
    """What this rank sees of each."""
    return [_scaled(rank, *step) for step in steps]


def _scaled(rank: int, layouts: tuple[str, ...], bad: int | None, ours: bool) -> Scaled:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameters = [_parameter(layout, mesh) for layout in layouts]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, SCALE)
    last = parameters[-1].grad
    assert last is not None
    if rank == bad:
        local_part(last)[0] = float("inf")
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    world = dist.new_group()
    assert isinstance(world, dist.ProcessGroup)
    scaler = WorldScaler(world, CPU, init_scale=SCALE) if ours else torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    return Scaled([local_part(parameter.detach()).tolist() for parameter in parameters], scaler.get_scale())


def _parameter(layout: str, mesh: DeviceMesh) -> nn.Parameter:
    if layout == "plain":
        return nn.Parameter(torch.zeros(2))
    placement: Placement = Replicate() if layout == "whole" else Shard(0)
    return nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [placement]))


@contextmanager
def slow_disk(rank: int) -> Generator[None]:
    """Make rank 0's disk slow to answer, so that its saving thread speaks later than its training does."""
    prompt: Callable[..., None] = FileSystemWriter.set_up_storage_writer

    def slow(*given: object, **named: object) -> None:
        if rank == 0:
            time.sleep(0.6)
        prompt(*given, **named)

    FileSystemWriter.set_up_storage_writer = slow  # pyright: ignore[reportAttributeAccessIssue]  # hands all on
    try:
        yield
    finally:
        FileSystemWriter.set_up_storage_writer = prompt


def saved_while_training(rank: int, folder: Path, ours: bool) -> list[float]:
    """Save, train on at once, then load: the weights that came back, which must be those of the save."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    own = torch.full((3,), 1.0 + rank)
    weight = DTensor.from_local(own, mesh, [Shard(0)])
    state = {"weight": weight}
    with slow_disk(rank):
        wait = _save_by_saver(state, folder) if ours else _save_by_torch(state, folder)
        time.sleep(0.2 * rank)
        for size in range(1, 200):
            total = torch.ones(1000 * size)
            dist.all_reduce(total)
            assert total.eq(dist.get_world_size()).all(), "an all-reduce took what the save said for a rank's share"
        own.fill_(-1.0)
        wait()
    dist.barrier()
    back = {"weight": DTensor.from_local(torch.zeros(3), mesh, [Shard(0)])}
    load(back, checkpoint_id=folder)
    return back["weight"].full_tensor().tolist()


def _save_by_torch(state: dict[str, DTensor], folder: Path) -> Callable[[], object]:
    running = async_save(state, checkpoint_id=folder)
    assert isinstance(running, Future)
    return running.result


def _save_by_saver(state: dict[str, DTensor], folder: Path) -> Callable[[], object]:
    saver = Saver()
    copied = {name: value.detach().clone() for name, value in state.items()}
    saver.start(lambda: save(copied, checkpoint_id=folder, process_group=saver.group))
    return saver.close


def saves_in_turn(rank: int) -> tuple[list[str], str]:
    """What happens when saves are asked for at once, of which the second fails, and what the third is told of that."""
    del rank
    saver, happened = Saver(), list[str]()

    def first() -> None:
        time.sleep(0.3)
        happened.append("first")

    def second() -> None:
        happened.append("second")
        raise BadInput("the disk is full")

    saver.start(first)
    saver.start(second)
    told = ""
    try:
        saver.start(lambda: happened.append("third"))
    except BadInput as error:
        told = str(error)
    saver.start(lambda: happened.append("fourth"))
    saver.close()
    return happened, told


class _RootAlone(Program):
    """The program, but after a step only the outermost module is told to reshard."""

    def step(self, index: int) -> Stepped:
        inside = self.data.after_step

        def root() -> None:
            for module in self.modules:
                assert isinstance(module, FSDPModule)
                module.reshard()

        self.data.after_step = root
        stepped = super().step(index)
        self.data.after_step = inside
        return stepped


def losses(rank: int, spec: RunSpec, root_alone: bool) -> list[float]:
    """The loss of each step, averaged over the ranks."""
    del rank
    program = (_RootAlone if root_alone else Program)(spec, World(spec, CPU))
    found: list[float] = []
    for index in range(spec.steps):
        loss = program.step(index).loss
        assert loss is not None
        mean = torch.tensor(loss)
        dist.all_reduce(mean)
        found.append(float(mean) / dist.get_world_size())
    return found


def divided(rank: int, factor: float, force_sum: bool) -> float:
    """The gradient of a weight after FSDP2's reduction with a factor of ours; without one it is 1 on every rank."""
    del rank
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layer = nn.Linear(1, dist.get_world_size(), bias=False)
    fully_shard(layer, mesh=mesh)
    assert isinstance(layer, FSDPModule)
    layer.set_gradient_divide_factor(factor)
    layer.set_force_sum_reduction_for_comms(force_sum)
    layer(torch.ones(1, 1)).sum().backward()
    gradient = next(layer.parameters()).grad
    assert gradient is not None
    return float(local_part(gradient))
