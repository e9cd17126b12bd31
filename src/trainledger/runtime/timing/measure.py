"""One rank's steps on the clock: unobserved, each one's time kept, and beside each what the machine was able to do."""

from __future__ import annotations

from time import perf_counter

import torch
import torch.distributed as dist

from trainledger.runtime.faults import FAULTS
from trainledger.runtime.program import Program
from trainledger.runtime.progress import Progress
from trainledger.runtime.timing.reference import VERSION, Beside, Reference
from trainledger.runtime.timing.timed import Timed, TimedStep, Timing
from trainledger.runtime.world import World, device_here

SHARE, LONGEST_S = 0.5, 0.25
"""Of a step, how long the reference beside it takes, and at most: one that is much shorter meets less of a machine that
others use than a step does."""


def measure(timed: Timed, progress: Progress) -> Timing:
    """Step `timed.run` on this rank and time each step from when all ranks are there to when all are done.

    Needs an initialised process group. Steps run on tokens that are drawn, as those of a proof.
    """
    device = device_here()
    program = Program(timed.run, World(timed.run, device))
    for fault in timed.run.faults:
        FAULTS[fault](program)
    clock = _Clock(program, device)
    total = timed.unmeasured + timed.steps
    shares: list[float] = []
    for index in range(timed.unmeasured):
        progress(index, total, f"step {index + 1}, not measured")
        step_s, unit_s = clock.step_s(index), sum(clock.reference())
        shares.append(min(SHARE * step_s, LONGEST_S) / unit_s)
    times = _agreed(min(shares, default=1.0), device)
    clock.peak_bytes = 0
    steps: list[TimedStep] = []
    before = clock.reference(times)
    for index in range(timed.unmeasured, total):
        progress(index, total, f"step {index + 1}")
        seconds, after = clock.step_s(index), clock.reference(times)
        steps.append(_step(seconds, before, after))
        before = after
    cuda = device.type == "cuda"
    return Timing(
        rank=dist.get_rank(),
        digest=timed.run.digest,
        steps=tuple(steps),
        reference_wire_bytes=clock.reference.wire_bytes,
        allocator_peak_bytes=clock.peak_bytes if cuda else None,
        device=torch.cuda.get_device_name(device) if cuda else "cpu",
        reference=VERSION,
        torch_version=str(torch.__version__),
    )


class _Clock:
    """Times steps of a program, and knows what the caching allocator had given out in them, where there is one.

    peak_bytes   most in any step so far, without what the reference holds all the time
    """

    def __init__(self, program: Program, device: torch.device) -> None:
        self.peak_bytes = 0
        self._program = program
        self._cuda = device if device.type == "cuda" else None
        before = self._allocated()
        self.reference = Reference(device, self._synchronize)
        self._beside_bytes = self._allocated() - before

    def step_s(self, index: int) -> float:
        """Seconds of one step, from when all ranks are there to when all are done."""
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
        dist.barrier()
        start = perf_counter()
        self._program.step(index)
        self._synchronize()
        dist.barrier()
        seconds = perf_counter() - start
        if self._cuda is not None:
            peak = torch.cuda.max_memory_allocated(self._cuda) - self._beside_bytes
            self.peak_bytes = max(self.peak_bytes, peak)
        return seconds

    def _allocated(self) -> int:
        return 0 if self._cuda is None else torch.cuda.memory_allocated(self._cuda)

    def _synchronize(self) -> None:
        """Wait for the device; a CPU is done when the call is."""
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)


def _agreed(times: float, device: torch.device) -> int:
    """How often the reference is done: as often as the rank that wants most, once at least."""
    most = torch.tensor(times, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return max(1, round(float(most)))


def _step(seconds: float, before: Beside, after: Beside) -> TimedStep:
    """A step beside the mean of the two references around it."""
    return TimedStep(
        seconds=seconds,
        reference_work_s=(before.work_s + after.work_s) / 2,
        reference_call_s=(before.call_s + after.call_s) / 2,
        reference_sum_s=(before.sum_s + after.sum_s) / 2,
    )
