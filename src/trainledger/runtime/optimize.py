"""The optimizer of a program, and clipping by the norm of all gradients of the job."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor, Shard

from trainledger.runtime.observe.tensors import local_part
from trainledger.runtime.precision.quiet import quiet_import
from trainledger.runtime.spec import RunSpec
from trainledger.runtime.tensors import value_of

BETAS, EPSILON = (0.9, 0.999), 1e-8
"""The defaults of torch.optim.AdamW."""

MOMENTUM = 0.9
"""torch.optim.SGD has none by default; any above zero makes it keep a buffer, which is what is accounted for."""


def build_optimizer(parameters: Iterable[nn.Parameter], spec: RunSpec) -> torch.optim.Optimizer:
    """The optimizer by the ledger's name, stepping list by list as on CUDA; `adamw-fused` in one kernel.

    Parameters on different meshes are groups of their own, for a list operation takes one mesh.
    """
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    lists: list[dict[str, Any]] = [{"params": group} for group in groups.values()]
    decay, rate = spec.weight_decay, spec.learning_rate
    match spec.optimizer:
        case "adamw-8bit" | "adamw-fp8":
            return _eight_bits(spec.optimizer, lists, lr=rate, betas=BETAS, eps=EPSILON, weight_decay=decay)
        case "adamw" | "adamw-fused":
            fused = spec.optimizer == "adamw-fused"
            return torch.optim.AdamW(
                lists, lr=rate, betas=BETAS, eps=EPSILON, weight_decay=decay, fused=fused, foreach=not fused
            )
        case "sgd":
            return torch.optim.SGD(lists, lr=rate, weight_decay=decay, foreach=True)
        case "sgd-momentum":
            return torch.optim.SGD(lists, lr=rate, momentum=MOMENTUM, weight_decay=decay, foreach=True)


def _eight_bits(name: str, lists: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:  # noqa: ANN401  # AdamW's
    """AdamW with moments in 8 bits, a scale to 256 elements; small and odd parts of a parameter keep them in 32.

    torchao compiles the step of each shape, which takes a compiler and most of a minute, and does not work below a
    dispatch mode, which whoever observes a run is. The same arithmetic is run as it is written instead.
    [torchao 0.18.0: optim/adam.py]
    """
    torchao = quiet_import("torchao.optim")
    # the codes of 8 bits are made once, from numbers, which the tensors of a dry run have not
    with unset_fake_temporarily():
        torchao.subclass_8bit.get_qmap_signed()
        torchao.subclass_8bit.get_qmap_unsigned()
    optimizer: torch.optim.Optimizer = {"adamw-8bit": torchao.AdamW8bit, "adamw-fp8": torchao.AdamWFp8}[name](
        lists, **settings
    )
    compiled = optimizer.step

    def step(closure: Any = None) -> Any:  # noqa: ANN401  # as torchao has it
        with torch.compiler.set_stance("force_eager"):
            return compiled(closure)

    optimizer.step = step
    return optimizer


def cut_by(tensor: torch.Tensor, axis: str) -> bool:
    """Whether a mesh axis divides a tensor."""
    if not isinstance(tensor, DTensor):
        return False
    names = tensor.device_mesh.mesh_dim_names or ()
    return axis in names and isinstance(tensor.placements[names.index(axis)], Shard)


def clip_gradients(
    gradients: Iterable[tuple[torch.Tensor, int]], limit: float, group: dist.ProcessGroup | None
) -> float:
    """Scale all gradients down to a global norm of `limit` and return the norm before.

    gradients   (gradient, how many ranks of the job hold this same part of it)
    group       all ranks of the job; None sums nothing

    One all-reduce of one fp32 over the whole job, whatever the meshes: each rank adds the squares of its own parts,
    divided by how often the job holds them.
    """
    parts = [(local_part(gradient), copies) for gradient, copies in gradients]
    total = torch.zeros((), dtype=torch.float32, device=parts[0][0].device if parts else None)
    for part, copies in parts:
        total += part.float().square().sum() / copies
    if group is not None and group.size() > 1:
        dist.all_reduce(total, group=group)
    norm = value_of(total.sqrt())
    if not norm <= limit:
        for part, _ in parts:
            part.mul_(limit / norm)
    return norm
