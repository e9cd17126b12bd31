"""One rank's run of a spec: build the program, step it, observe the last step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist

from trainledger.runtime.faults import FAULTS
from trainledger.runtime.observe.observation import Observation
from trainledger.runtime.observe.observer import Observer
from trainledger.runtime.program import Program
from trainledger.runtime.spec import RunSpec
from trainledger.runtime.world import World

Progress = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, what comes next)."""


def run(spec: RunSpec, progress: Progress, device: torch.device | None = None) -> Observation:
    """Train `spec.steps` steps on this rank and say what the last of them held, sent, computed and took.

    Needs an initialised process group.
    """
    device = device or torch.device("cpu")
    world = World(spec, device)
    observer = Observer(world.names)
    losses: list[float] = []
    with observer.watching():
        program = Program(spec, world, observer)
        for index in range(spec.steps):
            progress(index, spec.steps, f"step {index + 1}")
            observed = index == spec.steps - 1
            if observed:
                program.group_gathered()
                for fault in spec.faults:
                    FAULTS[fault](program)
            with observer.observing() if observed else nullcontext():
                loss = program.step(index)
            if loss is not None:
                losses.append(loss)
    progress(spec.steps, spec.steps, "done")
    return observer.result(dist.get_rank(), spec.digest, losses)
