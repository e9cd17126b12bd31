"""Whole tensors from the parts that ranks hold: what parity with a single process is judged by, and what is saved."""

from __future__ import annotations

from collections.abc import Iterable

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
    return _whole(program, ((kept.name, kept.parameter.grad) for kept in program.parameters))


def full_weights(program: Program) -> dict[str, torch.Tensor]:
    """The whole of each parameter of this rank's stages, by name; between steps only."""
    return _whole(program, ((kept.name, kept.parameter.detach()) for kept in program.parameters))


def _whole(program: Program, tensors: Iterable[tuple[str, torch.Tensor | None]]) -> dict[str, torch.Tensor]:
    group = program.world.group("ep")
    return {
        name: full_tensor(tensor, group if ".*." in name else None) for name, tensor in tensors if tensor is not None
    }
