"""Loss scaling for fp16: every rank of the job skips a step, or none does.

PyTorch's own scaler asks the first gradient of an optimizer how it lies and takes that for all: with a whole gradient
first and a cut one second, an infinity in a rank's part of the second stays that rank's secret. It asks nobody where
gradients are plain tensors, as those of a pipeline stage are. The rank that knows skips, the others step, and their
weights part. [torch: distributed/tensor/_dispatch.py found_inf_reduce_handler, amp/grad_scaler.py]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from trainledger.errors import BadInput
from trainledger.runtime.observe.tensors import local_part
from trainledger.runtime.spec import Scaling
from trainledger.runtime.tensors import Kept, value_of

MOST_NAMED = 8
"""Layers that an error names; it counts the rest."""


class WorldScaler(torch.amp.GradScaler):
    """A GradScaler that finds an infinity wherever in the job it is.

    world      all ranks of the job; None where there is one
    minimum    the scale never goes below
    settings   those of GradScaler

    Each rank looks at its own parts of its gradients, whatever their meshes, and one all-reduce of one fp32 over the
    job says what was found. A rank that computes no loss has the scale all the same.
    """

    def __init__(
        self,
        world: dist.ProcessGroup | None,
        device: torch.device,
        *,
        minimum: float = 0.0,
        **settings: Any,  # noqa: ANN401  # GradScaler's
    ) -> None:
        super().__init__(device.type, **settings)
        self._world = world
        self.minimum = minimum
        # private: it waits for a first loss, which the stages of a pipeline but the last never have
        self._lazy_init_scale_growth_tracker(device)

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

    def advance(self, optimizer: torch.optim.Optimizer, parameters: Iterable[Kept]) -> bool:
        """Step once gradients are unscaled, unless one of the job is not finite; whether the step was skipped.

        After a skipped step the scale is half of what it was, or the minimum. An infinity at the minimum is an error on
        every rank, for no smaller scale is left to try.
        """
        # private: GradScaler keeps what it found per optimizer, and tells nobody
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        skipped = any(value_of(value) > 0 for value in found)
        if skipped and self.scale_now <= self.minimum:
            raise BadInput(self._at_minimum(_not_finite(parameters)))
        if not skipped:
            # gradients are unscaled, so there is nothing that an optimizer should be told by its own scaler
            optimizer.step()
        self.update()
        if self.scale_now < self.minimum:
            self.update(self.minimum)
        return skipped

    @property
    def scale_now(self) -> float:
        """What the loss is multiplied by; of a dry run, whose tensors are fake, not a number."""
        assert self._scale is not None, "made with the scaler"
        return value_of(self._scale)

    def kept(self) -> tuple[torch.Tensor, ...]:
        """The scale, and the steps since it grew."""
        found = self._scale, self._growth_tracker
        return tuple(tensor for tensor in found if tensor is not None)

    def _at_minimum(self, layers: list[str]) -> str:
        named = ", ".join(layers[:MOST_NAMED])
        more = f" and {len(layers) - MOST_NAMED} more" if len(layers) > MOST_NAMED else ""
        return (
            f"gradients are not finite at a loss scale of {self.minimum:g}, the smallest that is allowed: those of "
            f"{named}{more}; lower the learning rate, lower the minimum of the scale, or use --precision bf16, which "
            "needs no scale"
        )


def make_scaler(settings: Scaling, world: dist.ProcessGroup | None, device: torch.device) -> WorldScaler:
    """The scaler of a run under fp16."""
    return WorldScaler(
        world,
        device,
        minimum=settings.minimum,
        init_scale=settings.initial,
        growth_interval=settings.growth_interval,
    )


def _parts(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """This rank's part of every gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield local_part(parameter.grad)


def _not_finite(parameters: Iterable[Kept]) -> list[str]:
    """Parameters of the whole job of which some rank has a gradient that is not finite. All ranks ask together."""
    own = [
        kept.name
        for kept in parameters
        if kept.parameter.grad is not None and not local_part(kept.parameter.grad).isfinite().all()
    ]
    every: list[list[str]] = [own]
    if dist.is_initialized():
        every = [own] * dist.get_world_size()
        dist.all_gather_object(every, own)
    return list(dict.fromkeys(name for part in every for name in part))
