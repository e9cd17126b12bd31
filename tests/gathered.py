"""Whole tensors from the parts that ranks hold: what parity with a single process is judged by."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainledger.runtime.program import Program


def full_tensor(tensor: torch.Tensor, ep: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The whole of a tensor; `ep` joins routed experts along dimension 0. All ranks that share it must ask together."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()
    if ep is None:
        return whole
    parts = [torch.empty_like(whole) for _ in range(ep.size())]
    dist.all_gather(parts, whole.contiguous(), group=ep)
    return torch.cat(parts)


def full_gradients(program: Program) -> dict[str, torch.Tensor]:
    """The whole gradient of each parameter of this rank's stages, by name."""
    group = program.world.group("ep")
    return {
        kept.name: full_tensor(kept.parameter.grad, group if ".*." in kept.name else None)
        for kept in program.parameters
        if kept.parameter.grad is not None
    }
