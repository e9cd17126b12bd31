"""PyTorch's pipeline schedules, by the ledger's names, with what a run that is accounted for needs of them.

1f1b          one stage per rank
interleaved   vpp stages per rank
zero-bubble   vpp stages per rank; gradients of weights are computed later than those of inputs, in ZB1P's order
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

# private: nothing public says in which order a schedule acts, or that it need not ask for shapes
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.microbatch import _Replicate
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

from trainledger.runtime.spec import Schedule

Actions = dict[int, list[_Action | None]]

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits of a micro-batch, its labels) to a loss."""


class Stage(PipelineStage):
    """A stage under whose split backward gradients are kept no longer, and no narrower, than under a whole one."""

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Compute the gradients of a micro-batch: all of them, or those of its input.

        PyTorch leaves the latter beside the input as well, for each micro-batch until the next step.
        [torch: distributed/pipelining/_backward.py stage_backward_input]
        """
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        for argument in self.args_recv_info[bwd_chunk_id]:
            if argument.buffer is not None:
                argument.buffer.grad = None

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Compute the weight gradients of a micro-batch.

        FSDP2 widens gradients in a hook of the backward, which has passed by now; without this they would be added
        up in 16 bits until the next backward of inputs.
        """
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                # private: FSDP2 has no public way to say that gradients are there
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    for parameter in group.fsdp_params:
                        parameter.accumulate_unsharded_grad_if_needed()
                        parameter.to_accumulated_grad_if_needed()


class _Described(_PipelineSchedule):
    """A schedule that takes the described boundary tensors as they are, without a vote of all stages."""

    def _warmup_p2p(self, stages: Iterable[Any], has_backward: bool, p2p_done: bool) -> None:
        """Nothing is sent; PyTorch would pass a number through all stages and back, which no fake group can answer."""
        del has_backward, p2p_done
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC


class _Kept(_Described, _PipelineScheduleRuntime):
    """A schedule that gathers each stage's weights once per step and keeps them.

    PyTorch's lets go of a stage when three others are needed before it, and gathers it again: with vpp above 3.
    [torch: distributed/pipelining/schedules.py _add_unshard_reshard]
    """

    def _prepare_schedule_with_comms(
        self,
        actions: Actions,
        format: Literal["compute_only", "compute_comms"] = "compute_only",  # noqa: A002  # PyTorch's name
    ) -> None:
        super()._prepare_schedule_with_comms(actions, format)
        for rank, order in self.pipeline_order_with_comms.items():
            self.pipeline_order_with_comms[rank] = _gathered_once(order)


def _gathered_once(order: list[_Action]) -> list[_Action]:
    """The order with the first gathering of each stage and its last resharding."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, action in enumerate(order):
        if action.computation_type == _ComputationType.UNSHARD:
            first.setdefault(action.stage_index, index)
        elif action.computation_type == _ComputationType.RESHARD:
            last[action.stage_index] = index
    moves = {_ComputationType.UNSHARD, _ComputationType.RESHARD}
    kept = {*first.values(), *last.values()}
    return [action for index, action in enumerate(order) if action.computation_type not in moves or index in kept]


class _OneForwardOneBackward(_Described, Schedule1F1B):
    """As PyTorch's."""


class _Interleaved(_Kept, ScheduleInterleaved1F1B):
    """As PyTorch's."""


class _ZeroBubble(_Kept, ScheduleInterleavedZeroBubble):
    """As PyTorch's."""


def build_schedule(
    name: Schedule, stages: list[Stage], num_microbatches: int, loss: Loss
) -> Schedule1F1B | ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble:
    """The schedule of a name; gradients are added up as they come, so the loss must be a micro-batch's share.

    `step` takes tokens, which are cut into micro-batches, and `positions`, which every micro-batch gets whole.
    """
    every: list[_PipelineStageBase] = [*stages]
    # private: a tensor that is not to be cut can only be told from others by this
    whole: dict[str, Any] = {"positions": _Replicate()}
    match name:
        case "1f1b":
            (stage,) = stages
            return _OneForwardOneBackward(
                stage, num_microbatches, loss_fn=loss, kwargs_chunk_spec=whole, scale_grads=False
            )
        case "interleaved":
            return _Interleaved(every, num_microbatches, loss_fn=loss, kwargs_chunk_spec=whole, scale_grads=False)
        case "zero-bubble":
            return _ZeroBubble(every, num_microbatches, loss_fn=loss, kwargs_chunk_spec=whole, scale_grads=False)
