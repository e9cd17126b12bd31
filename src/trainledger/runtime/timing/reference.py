"""Fixed work that is timed beside each step: how fast the ranks of a run can be at the moment, whatever the layout.

Other processes, heat and power limits slow a machine for a while, and whoever compares two layouts would take that for
a difference between them. A step in units of this work is nearly the same on a busy machine and on an idle one.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

VERSION = 1
"""Rises with any change below: what was measured in units of one is not compared with what was in another's."""


class Size(NamedTuple):
    """Rows, width, how often, and what all ranks sum: work of a hundredth of a second or so on each kind of device."""

    rows: int
    width: int
    times: int
    sent_bytes: int
    dtype: torch.dtype


SIZES: dict[str, Size] = {
    "cpu": Size(rows=128, width=256, times=4, sent_bytes=1 << 20, dtype=torch.float32),
    "cuda": Size(rows=4096, width=4096, times=8, sent_bytes=1 << 26, dtype=torch.bfloat16),
}


class Beside(NamedTuple):
    """Seconds of arithmetic, of a sum of one number over all ranks, and of one of many; both 0 on a single rank."""

    work_s: float
    call_s: float
    sum_s: float


class Reference:
    """A small network forward and backward, then two sums over all ranks; all of them call it together."""

    def __init__(self, device: torch.device, synchronize: Callable[[], None]) -> None:
        self._size = size = SIZES[device.type]
        self._synchronize = synchronize
        generator = torch.Generator(device).manual_seed(0)

        def drawn(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, device=device, dtype=size.dtype, generator=generator) / columns**0.5

        self._input = drawn(size.rows, size.width)
        self._weights = [drawn(size.width, size.width).requires_grad_() for _ in range(size.times)]
        self._number = torch.zeros(1, device=device, dtype=size.dtype)
        self._sent = torch.zeros(size.sent_bytes // size.dtype.itemsize, device=device, dtype=size.dtype)

    @property
    def wire_bytes(self) -> int:
        """What one rank sends in the sum of many numbers, by the ring algorithm."""
        ranks = dist.get_world_size()
        return 2 * (ranks - 1) * self._sent.nbytes // ranks

    def __call__(self, times: int = 1) -> Beside:
        """Do it so many times from when all ranks are there: seconds of one time, on average."""
        dist.barrier()
        each = [self._once() for _ in range(times)]
        return Beside(*(sum(parts) / times for parts in zip(*each, strict=True)))

    def _once(self) -> Beside:
        start = self._read()
        x = self._input
        for weight in self._weights:
            x = x + functional.gelu(functional.layer_norm(x @ weight, x.shape[1:]))
        x.square().mean().backward()
        for weight in self._weights:
            weight.grad = None
        middle = self._read()
        if dist.get_world_size() == 1:
            return Beside(middle - start, 0.0, 0.0)
        dist.all_reduce(self._number)
        called = self._read()
        dist.all_reduce(self._sent)
        return Beside(middle - start, called - middle, self._read() - called)

    def _read(self) -> float:
        self._synchronize()
        return perf_counter()
