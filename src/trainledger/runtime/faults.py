"""Planted faults: what a proof must turn red for, each named. None is on unless a spec asks for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.fsdp import FSDPModule

from trainledger.runtime.program import Program


def extra_buffer(program: Program) -> None:
    """A tensor of 4 KiB that no line claims, held from now on."""
    program.kept.append(torch.zeros(1024, dtype=torch.float32, device=program.world.device))


def doubled_all_gather(program: Program) -> None:
    """One unit is gathered once more than its plan says."""
    unit = next(m for d in program.decoders for m in d.modules() if isinstance(m, FSDPModule))
    unit.unshard()
    unit.reshard()


def bf16_moment(program: Program) -> None:
    """The first moment of the first parameter is kept in bf16."""
    state = next(iter(program.optimizer.state.values()))
    state["exp_avg"] = state["exp_avg"].to(torch.bfloat16)


def dropped_collective(program: Program) -> None:
    """Clipping no longer sums the norm over the job."""
    program.sums_norm = False


FAULTS: dict[str, Callable[[Program], None]] = {
    "extra-buffer": extra_buffer,
    "doubled-all-gather": doubled_all_gather,
    "bf16-moment": bf16_moment,
    "dropped-collective": dropped_collective,
}
"""Each is applied before the observed step."""
