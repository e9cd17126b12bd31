"""Styles of tensor parallelism that PyTorch lacks: the ways into and out of a region, and computing on local parts.

A style is applied to a module by `parallelize_module`. Tensors between modules are plain ones; only parameters are
DTensors, and only outside the forward of the module that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor.parallel import ParallelStyle


class Enter(ParallelStyle):
    """The way into a region: its first input whole on every rank, the gradient of it a sum over them.

    PyTorch's own style hands on local tensors only where their gradients are whole. [torch: PrepareModuleInput]
    """

    def __init__(self, outside: Placement) -> None:
        self._there, self._back = (outside, Replicate()), (Partial(), outside)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (_exchanged(given[0], device_mesh, self._there, self._back), *given[1:])

        module.register_forward_pre_hook(enter)
        return module


class Leave(ParallelStyle):
    """The way out of a region, by default of a sum over the ranks, whose gradient is whole on every rank.

    What PyTorch's own style gives is a view, which FSDP2 warns of at the end of a unit. [torch: PrepareModuleOutput]
    """

    def __init__(self, outside: Placement, *, inside: Placement | None = None) -> None:
        inside = inside or Partial()
        self._there, self._back = (inside, outside), (outside, Replicate() if inside.is_partial() else inside)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def leave(_: nn.Module, __: tuple[Tensor, ...], out: Tensor) -> Tensor:
            return _exchanged(out, device_mesh, self._there, self._back)

        module.register_forward_hook(leave)
        return module


Way = tuple[Placement, Placement]
"""How a tensor lies before an exchange and after it."""


def _exchanged(given: Tensor, mesh: DeviceMesh, there: Way, back: Way) -> Tensor:
    """The tensor laid out anew, and its gradient on the way back."""
    return cast("Tensor", _Exchange.apply(given, mesh, there, back))


class _Context(Protocol):
    """What the backward finds of its forward."""

    mesh: DeviceMesh
    back: Way


class _Exchange(torch.autograd.Function):
    """One exchange each way, of plain tensors; DTensor knows which collective that is."""

    @staticmethod
    def forward(ctx: _Context, given: Tensor, mesh: DeviceMesh, there: Way, back: Way) -> Tensor:
        ctx.mesh, ctx.back = mesh, back
        return _moved(given, mesh, there)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _moved(grads[0], ctx.mesh, ctx.back), None, None, None


def _moved(given: Tensor, mesh: DeviceMesh, way: Way) -> Tensor:
    before, after = way
    if before == after:
        return given
    return DTensor.from_local(given, mesh, [before], run_check=False).redistribute(placements=[after]).to_local()


class Spot(NamedTuple):
    """A parameter by its module and name; `shared`: every rank adds an equal share of it to a sum."""

    module: nn.Module
    name: str
    shared: bool = False


class Local(ParallelStyle):
    """A module that computes on this rank's part of its parameters; arguments as of OnLocalParts."""

    def __init__(self, spots: Iterable[Spot], partial: Iterable[str]) -> None:
        self._spots = tuple(spots)
        self._partial = tuple(partial)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.forward = OnLocalParts(module.forward, device_mesh, self._spots, self._partial)
        return module


class OnLocalParts:
    """A module's forward with this rank's part of each parameter in its place while it runs.

    spots     every parameter that the forward reads, here or in a module below
    partial   names, below the module, of parameters whose gradient is a sum over the ranks
    """

    def __init__(
        self, forward: Callable[..., object], mesh: DeviceMesh, spots: tuple[Spot, ...], partial: tuple[str, ...]
    ) -> None:
        self._forward = forward
        self._spots = spots
        self.mesh = mesh
        self.partial = partial

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The module's own forward."""
        with self._swapped():
            return self._forward(*args, **kwargs)

    @contextmanager
    def _swapped(self) -> Generator[None]:
        """FSDP2 puts other tensors under the same names from one call to the next, so they are looked up each time."""
        # the dictionary of a module takes tensors that are no parameters, which its attributes do not
        held = [(spot.module._parameters, spot.name, spot.shared) for spot in self._spots]
        before = [parameters[name] for parameters, name, _ in held]
        for (parameters, name, shared), parameter in zip(held, before, strict=True):
            assert isinstance(parameter, DTensor)
            parameters[name] = _own(parameter, shared=shared)
        try:
            yield
        finally:
            for (parameters, name, _), parameter in zip(held, before, strict=True):
                parameters[name] = parameter


def _own(parameter: DTensor, *, shared: bool) -> nn.Parameter:
    """This rank's part, a tensor that modules take for a parameter. [torch: nn/parameter.py, _ParameterMeta]"""
    own = parameter.to_local()
    if shared:
        own = cast("Tensor", _Share.apply(own, parameter.device_mesh.size()))
    own._is_param = True  # pyright: ignore[reportAttributeAccessIssue]  # not declared, but what isinstance looks for
    return cast("nn.Parameter", own)


class _Share(torch.autograd.Function):
    """An equal share of what all ranks add up. What each rank sees of the gradient is that of the whole already."""

    @staticmethod
    def forward(ctx: object, whole: Tensor, ranks: int) -> Tensor:
        del ctx
        return whole / ranks

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        del ctx
        return grads[0], None


class OwnRows(ParallelStyle):
    """A table of which this rank holds some rows: those of other ranks look up as zero, to be summed over all."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        look_up = module.forward

        def forward(ids: Tensor) -> Tensor:
            (table,) = module.parameters()
            index = ids - device_mesh.get_local_rank() * len(table)
            own = (index >= 0) & (index < len(table))
            return look_up(index.where(own, 0)) * own[..., None]

        module.forward = forward
        return module


class OwnPositions(ParallelStyle):
    """A table of positions that is asked for those of this rank's slice of the sequence only."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def slice_of(_: nn.Module, ids: tuple[Tensor]) -> tuple[Tensor]:
            return (ids[0].chunk(device_mesh.size())[device_mesh.get_local_rank()],)

        module.register_forward_pre_hook(slice_of)
        return module
