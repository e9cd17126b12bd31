"""Loss scaling for fp16: every rank of the job skips a step, or none does.

PyTorch's own scaler asks the first gradient of an optimizer how it lies and takes that for all: with a whole gradient
first and a cut one second, an infinity in a rank's part of the second stays that rank's secret. It asks nobody where
gradients are plain tensors, as those of a pipeline stage are. The rank that knows skips, the others step, and their
weights part. [torch: distributed/tensor/_dispatch.py found_inf_reduce_handler, amp/grad_scaler.py]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from trainledger.errors import BadInput
from trainledger.runtime.observe.tensors import local_part


class WorldScaler(torch.amp.GradScaler):
    """A GradScaler that finds an infinity wherever in the job it is.

    world      all ranks of the job; None where there is one
    settings   those of GradScaler

    Each rank looks at its own parts of its gradients, whatever their meshes, and one all-reduce of one fp32 over the
    job says what was found.
    """

    def __init__(self, world: dist.ProcessGroup | None, device: torch.device, **settings: Any) -> None:  # noqa: ANN401  # GradScaler's
        super().__init__(device.type, **settings)
        self._world = world

    def _unscale_grads_(  # pyright: ignore[reportImplicitOverride]  # private: all that unscales and looks goes here
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        kinds: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for part in _parts(optimizer):
            kinds[part.dtype].append(part)
        if torch.float16 in kinds and not allow_fp16:
            raise BadInput("gradients in fp16 cannot be unscaled, for they would underflow; keep parameters in fp32")
        for parts in kinds.values():
            torch.ops.aten._amp_foreach_non_finite_check_and_unscale_(parts, found_inf, inv_scale)
        if self._world is not None:
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, self._world)
        return {found_inf.device: found_inf}


def _parts(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """This rank's part of every gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield local_part(parameter.grad)
