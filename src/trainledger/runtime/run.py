"""One rank's run of a spec: build the program, step it, observe the last step."""

from __future__ import annotations

from contextlib import nullcontext

import msgspec
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from trainledger.lines import CHECKPOINT, line_id
from trainledger.runtime.checkpoint.measure import trial
from trainledger.runtime.faults import FAULTS
from trainledger.runtime.observe.observation import Observation
from trainledger.runtime.observe.observer import Observer
from trainledger.runtime.program import Program
from trainledger.runtime.progress import Progress
from trainledger.runtime.spec import RunSpec
from trainledger.runtime.world import World, device_here


def run(spec: RunSpec, progress: Progress, *, fake: FakeTensorMode | None = None) -> Observation:
    """Train `spec.steps` steps on this rank and say what the last of them held, sent, computed and took.

    Needs an initialised process group. `fake` is the mode of a dry run: tensors have no memory.
    """
    world = World(spec, device_here())
    observer = Observer(world.names, torch.cuda.synchronize if world.device.type == "cuda" else None)
    losses: list[float] = []
    with fake or nullcontext(), observer.watching():
        program = Program(spec, world, observer)
        for index in range(spec.steps):
            progress(index, spec.steps, f"step {index + 1}")
            observed = index == spec.steps - 1
            if observed:
                program.group_gathered()
                for fault in spec.faults:
                    FAULTS[fault](program)
            with observer.observing() if observed else nullcontext():
                loss = program.step(index).loss
            if loss is not None:
                losses.append(loss)
    progress(spec.steps, spec.steps, "done")
    seen = observer.result(dist.get_rank(), spec.digest, losses)
    return msgspec.structs.replace(seen, saved=_saved(program, spec.steps)) if spec.checkpoint else seen


def _saved(program: Program, step: int) -> dict[str, int]:
    """What a checkpoint of all ranks has in its files, on the first; saved when nobody observes any more."""
    found = trial(program, step)
    return {} if found is None else {line_id("held", "outside", CHECKPOINT, "disk"): found.payload_bytes}
