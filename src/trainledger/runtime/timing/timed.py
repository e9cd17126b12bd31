"""What a rank is told to time, and what it saw, as plain data. No torch here."""

from __future__ import annotations

import msgspec

from trainledger.runtime.spec import RunSpec, Told


class Timed(Told, frozen=True, kw_only=True):
    """A run on the clock.

    unmeasured  steps before any is timed: DDP makes its buckets anew in the second, optimizers their state in the first
    steps       those that are timed
    """

    run: RunSpec
    unmeasured: int = 3
    steps: int = 30


class TimedStep(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step, and of the reference beside it: its arithmetic, and its sums over all ranks."""

    seconds: float
    reference_work_s: float
    reference_call_s: float
    reference_sum_s: float


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's timed steps.

    reference_wire_bytes  what a rank sends in the reference's larger sum, by the ring algorithm
    allocator_peak_bytes  most that PyTorch's caching allocator had given out in the timed steps; None on a CPU, which
                          has none
    reference             the version of the reference
    """

    rank: int
    digest: str
    steps: tuple[TimedStep, ...]
    reference_wire_bytes: int
    allocator_peak_bytes: int | None
    device: str
    reference: int
    torch_version: str
