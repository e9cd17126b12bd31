"""Whether the ranks of one machine fit into its memory, asked before any of them starts."""

from __future__ import annotations

import os
from pathlib import Path

from trainledger.errors import Refused
from trainledger.units import format_bytes


def check_host_memory(ranks: int, rank_bytes: int, available_bytes: int | None = None, *, knob: str = "") -> None:
    """Refuse `ranks` processes of `rank_bytes` each where less is available (default: on this machine, now).

    `knob` is what else whoever asks can turn.
    """
    available = host_available_bytes() if available_bytes is None else available_bytes
    if ranks * rank_bytes > available:
        raise Refused(
            "runtime-host-memory",
            f"{ranks} ranks on this machine need {format_bytes(ranks * rank_bytes)} ({format_bytes(rank_bytes)} each), "
            f"and {format_bytes(available)} of its memory are available; use fewer ranks (tp, pp, cp, dp) or smaller "
            f"shapes (layers, hidden size, seq, mbs){knob and f', or {knob}'}",
        )


def host_available_bytes(meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that new processes can have without swapping: the kernel's MemAvailable, or less in a container.

    [linux: Documentation/filesystems/proc.rst, Documentation/admin-guide/cgroup-v2.rst]
    """
    if not meminfo.exists():
        # No kernel estimate here: all of the machine's memory is the most there can be.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit = group / "memory.max"
    if not limit.exists() or (most := limit.read_text().strip()) == "max":
        return available
    statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    used = int((group / "memory.current").read_text()) - int(statistics["inactive_file"])
    return min(available, int(most) - used)
