"""One rank's steps on the clock: unobserved, each one's time kept, and beside each what the machine was able to do."""

from __future__ import annotations

from time import perf_counter

import torch
import torch.distributed as dist

from trainledger.runtime.faults import FAULTS
from trainledger.runtime.program import Program
from trainledger.runtime.progress import Progress
from trainledger.runtime.reference import VERSION, Beside, Reference
from trainledger.runtime.run import device_here
from trainledger.runtime.timed import Timed, TimedStep, Timing
from trainledger.runtime.world import World


def measure(timed: Timed, progress: Progress) -> Timing:
    """Step `timed.run` on this rank and time each step from when all ranks are there to when all are done.

    Needs an initialised process group. Steps run on tokens that are drawn, as those of a proof.
    """
    device = device_here()
    world = World(timed.run, device)
    program = Program(timed.run, world)
    for fault in timed.run.faults:
        FAULTS[fault](program)
    reference = Reference(device, _synchronize if device.type == "cuda" else _nothing)
    total = timed.unmeasured + timed.steps
    for index in range(timed.unmeasured):
        progress(index, total, f"step {index + 1}, not measured")
        program.step(index)
        reference()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    steps: list[TimedStep] = []
    before = reference()
    for index in range(timed.unmeasured, total):
        progress(index, total, f"step {index + 1}")
        seconds = _seconds(program, index)
        after = reference()
        steps.append(_step(seconds, before, after))
        before = after
    return Timing(
        rank=dist.get_rank(),
        digest=timed.run.digest,
        steps=tuple(steps),
        reference_wire_bytes=reference.wire_bytes,
        allocator_peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        reference=VERSION,
        torch_version=str(torch.__version__),
    )


def _seconds(program: Program, index: int) -> float:
    synchronize = _synchronize if program.world.device.type == "cuda" else _nothing
    dist.barrier()
    start = perf_counter()
    program.step(index)
    synchronize()
    dist.barrier()
    return perf_counter() - start


def _step(seconds: float, before: Beside, after: Beside) -> TimedStep:
    """A step beside the mean of the two references around it."""
    return TimedStep(
        seconds=seconds,
        reference_work_s=(before.work_s + after.work_s) / 2,
        reference_call_s=(before.call_s + after.call_s) / 2,
        reference_sum_s=(before.sum_s + after.sum_s) / 2,
    )


def _synchronize() -> None:
    torch.cuda.synchronize()


def _nothing() -> None:
    """A CPU is done when the call is."""
