"""What a process holds now, and at most, by the meter that its device has."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Literal

import torch

Meter = Literal["allocated", "resident"]

_STATM = Path("/proc/self/statm")


def meter_of(device: torch.device) -> Meter:
    """On CUDA what PyTorch's allocator has given out, on the CPU what of the process is in memory."""
    return "allocated" if device.type == "cuda" else "resident"


def held_bytes(device: torch.device) -> int:
    """On CUDA the most since the last call, so that a step has its own peak; on the CPU what is resident now."""
    if device.type == "cuda":
        most = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return most
    if _STATM.exists():
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    # no such file here: the most that was ever resident, which macOS counts in bytes and others in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
