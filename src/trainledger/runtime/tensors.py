"""The tensors that a program keeps, by the ledger's names: what observers compare live storages with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from trainledger.runtime.observe.tensors import stored_parts

_WRAPPERS = ("_checkpoint_wrapped_module.", "module.")
"""Prefixes that checkpoints and DDP put into names."""


class Named(NamedTuple):
    """A tensor with the last part of its line id and the category it belongs to."""

    category: str
    name: str
    tensor: torch.Tensor


class Kept(NamedTuple):
    """One parameter: the tensor that the optimizer steps on, and FSDP2's record of it where FSDP2 wraps it."""

    name: str
    parameter: nn.Parameter
    record: FSDPParam | None


def value_of(scalar: torch.Tensor) -> float:
    """The number in a tensor of one element; a fake one holds none, so it is not a number."""
    return math.nan if isinstance(scalar, FakeTensor) else float(scalar)


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers added.

    >>> plain_name("model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    return name.replace(_WRAPPERS[0], "").removeprefix(_WRAPPERS[1])


def kept_parameters(module: nn.Module) -> list[Kept]:
    """Every parameter once, in the module's order. While FSDP2 has it gathered, the module shows another tensor."""
    records: dict[tuple[nn.Module, str], FSDPParam] = {}
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # FSDP2 has no public way from a parameter to its shard while it is gathered
            for group in part._get_fsdp_state()._fsdp_param_groups:
                for record in group.fsdp_params:
                    info = record._module_info
                    records[info.module, info.param_name] = record
    kept: list[Kept] = []
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            record = records.get((part, name))
            tensor = parameter if record is None else record.sharded_param
            if id(tensor) not in seen and not _shared(record, part, name):
                seen.add(id(tensor))
                full = f"{prefix}.{name}" if prefix else name
                kept.append(Kept(plain_name(full), tensor, record))
    return kept


def _shared(record: FSDPParam | None, module: nn.Module, name: str) -> bool:
    """Whether this is a second place of a tied parameter."""
    info = None if record is None else record._module_info
    return info is not None and (info.module, info.param_name) != (module, name)


def kept_tensors(parameters: list[Kept], optimizer: torch.optim.Optimizer) -> Iterator[Named]:
    """Weights, gradients and optimizer state, and what FSDP2 holds gathered or unreduced at this moment."""
    for kept in parameters:
        yield Named("weights", kept.name, kept.parameter)
        if kept.parameter.grad is not None:
            yield Named("gradients", kept.name, kept.parameter.grad)
        for what, value in optimizer.state.get(kept.parameter, {}).items():
            if isinstance(value, torch.Tensor):
                yield from (Named("optimizer", f"{kept.name}:{what}", part) for part in stored_parts(value))
        if kept.record is not None:
            yield from _gathered(kept.name, kept.record)
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            yield Named("buffers", "learning rate", group["lr"])


def gathered_units(module: nn.Module) -> Iterator[tuple[str, Sequence[torch.Tensor]]]:
    """What FSDP2 gathers at once: the first of its parameters names a unit; after a first forward only."""
    names = {part: prefix for prefix, part in module.named_modules()}
    for part in module.modules():
        if isinstance(part, FSDPModule):
            for group in part._get_fsdp_state()._fsdp_param_groups:
                whole = [record._unsharded_param for record in group.fsdp_params if hasattr(record, "_unsharded_param")]
                if whole:
                    info = group.fsdp_params[0]._module_info
                    yield plain_name(f"{names[info.module]}.{info.param_name}"), whole


def _gathered(name: str, record: FSDPParam) -> Iterator[Named]:
    whole = getattr(record, "_unsharded_param", None)
    if whole is None:
        return
    yield Named("weights", f"{name}:gathered weights", whole)
    unreduced = record.unsharded_accumulated_grad if record.unsharded_accumulated_grad is not None else whole.grad
    if unreduced is not None:
        yield Named("gradients", f"{name}:unsharded gradients", unreduced)
