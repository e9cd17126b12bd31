"""Planted faults: what a proof, or a comparison of times, must turn red for. None is on unless a spec asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.distributed.fsdp import FSDPModule

from trainledger.runtime.program import Program, Stepped

SLOWER = 0.2
"""By how much of itself a planted slow step is longer."""


def extra_buffer(program: Program) -> None:
    """A tensor of 4 KiB that no line claims, held from now on."""
    program.kept.append(torch.zeros(1024, dtype=torch.float32, device=program.world.device))


def doubled_all_gather(program: Program) -> None:
    """The first unit is gathered once more than its plan says, before each forward."""
    decoder = program.decoders[0]
    # private: the root is such a module too, and has no parameters of its own to gather
    unit = next(m for m in decoder.modules() if isinstance(m, FSDPModule) and m._get_fsdp_state()._fsdp_param_groups)

    def gather(*_: object) -> None:
        unit.unshard()
        unit.reshard()

    decoder.register_forward_pre_hook(gather)


def bf16_moment(program: Program) -> None:
    """After the step the first moment of the first parameter is kept in bf16."""

    def halve(optimizer: torch.optim.Optimizer, *_: object) -> None:
        state = next(iter(optimizer.state.values()))
        state["exp_avg"] = state["exp_avg"].to(torch.bfloat16)

    program.optimizer.register_step_post_hook(halve)


def dropped_collective(program: Program) -> None:
    """Clipping no longer sums the norm over the job."""
    program.sums_norm = False


def slow_step(program: Program) -> None:
    """Every step takes a fifth longer than it would; a proof, which judges no times, does not find it."""
    step = program.step

    def slowed(index: int) -> Stepped:
        start = time.perf_counter()
        found = step(index)
        end = time.perf_counter()
        # a rank that slept would be given more of a busy machine afterwards, and lose less than it should
        while time.perf_counter() < end + SLOWER * (end - start):
            pass
        return found

    program.step = slowed  # pyright: ignore[reportAttributeAccessIssue]  # of this program alone


FAULTS: dict[str, Callable[[Program], None]] = {
    "extra-buffer": extra_buffer,
    "doubled-all-gather": doubled_all_gather,
    "bf16-moment": bf16_moment,
    "dropped-collective": dropped_collective,
    "slow-step": slow_step,
}
"""Each is planted before the observed step, or before all of those that are timed."""
