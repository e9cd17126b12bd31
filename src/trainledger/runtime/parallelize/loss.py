"""The loss: mean cross-entropy over a rank's tokens, from whole logits or from logits cut along the vocabulary.

PyTorch's own loss over a cut vocabulary needs its context manager around the backward too, and a pipeline's schedule
runs backwards where no caller can put one. [torch: distributed/tensor/parallel/loss.py] So the cut loss is a function
of autograd here. It exchanges what Megatron's does: of every token the largest logit, the logit of its label and the
sum of exponentials, in fp32. [megatron: tensor_parallel/cross_entropy.py]
"""

from __future__ import annotations

from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from trainledger.runtime.spec import RunSpec


def loss_of(logits: Tensor, labels: Tensor, spec: RunSpec, tp_mesh: DeviceMesh | None) -> Tensor:
    """Mean cross-entropy of logits [B, S, V] and labels [B, S], computed in fp32.

    With loss parallelism a rank of `tp_mesh` has [B, S, V / tp]: its own part of the vocabulary.
    """
    rows, wanted = logits.flatten(0, -2), labels.flatten()
    if tp_mesh is None or tp_mesh.size() == 1 or not spec.loss_parallel:
        return functional.cross_entropy(rows.float(), wanted)
    first = tp_mesh.get_local_rank() * rows.shape[-1]
    return cast("Tensor", _CutCrossEntropy.apply(rows, wanted - first, tp_mesh.get_group()))


class _Context(Protocol):
    """What the backward finds of its forward."""

    saved_tensors: tuple[Tensor, ...]
    dtype: torch.dtype

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _CutCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of logits [T, V / tp]; `label` [T] counts from this rank's first, and may lie outside."""

    @staticmethod
    def forward(ctx: _Context, logits: Tensor, label: Tensor, group: dist.ProcessGroup) -> Tensor:
        scores = logits.to(torch.float32, copy=True)
        own = (label >= 0) & (label < scores.shape[-1])
        index = label.where(own, 0)[:, None]
        largest = scores.amax(dim=-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        scores -= largest[:, None]
        wanted = scores.gather(1, index)[:, 0] * own
        dist.all_reduce(wanted, group=group)
        total = scores.exp_().sum(dim=-1)
        dist.all_reduce(total, group=group)
        scores /= total[:, None]
        ctx.save_for_backward(scores, index, own)
        ctx.dtype = logits.dtype
        return (total.log() - wanted).mean()

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        probability, index, own = ctx.saved_tensors
        # in the place of what was saved, which nothing else sees; a second backward is an error of autograd's
        probability.scatter_add_(1, index, -own[:, None].to(probability.dtype))
        probability *= grads[0] / len(probability)
        return probability.to(ctx.dtype), None, None
