"""Which part of every tensor this rank holds: weights and optimizer states by name, as boxes of the whole.

The names of weights are those of the Hugging Face state dict, a stack of experts under one with `*`; an optimizer
state has that name and its own, so that it is found again whatever the order of parameters, and on whichever stage.
Replicas and both ends of a pipeline with a tied embedding hold the same box, which is written once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.tensor import DTensor

from trainledger.runtime.model.moe import Moe
from trainledger.runtime.observe.tensors import local_part
from trainledger.runtime.program import Program
from trainledger.runtime.tensors import plain_name

WEIGHTS, OPTIMIZER = "model.", "optimizer."
"""Where keys begin; the key of an optimizer state ends with `:` and the optimizer's word for it."""

SCALES = ":scales@"
"""In the key of the scales of one box, followed by its first element and its sizes."""


class Box(NamedTuple):
    """A part of a tensor: its first element in the whole, how far it goes, and the sizes of the whole."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    whole: tuple[int, ...]

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The same in PyTorch's words."""
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=torch.Size(self.sizes))


class Part(NamedTuple):
    """This rank's box of one tensor.

    values   a plain tensor of the box's sizes, which shares memory with what the program keeps, unless that is coded
    coded    the tensor of codes and scales (8-bit optimizers) that `values` was decoded from, else None
    scales   the key of those scales; "" where the values tell them
    """

    key: str
    box: Box
    values: Tensor
    coded: Any = None
    scales: str = ""

    def put_back(self, *, scaled: bool) -> None:
        """Give the program what was read into `values`; `scaled`: its scales are there already."""
        if self.coded is None:
            return
        if scaled:
            blocks = self.values.view(-1, self.coded.block_size) / self.coded.scale.view(-1, 1)
            self.coded.codes.copy_(_nearest(blocks.view_as(self.values), self.coded.qmap))
        else:
            self.coded.copy_(self.values)


def weights_key(name: str) -> str:
    """The key of a parameter."""
    return f"{WEIGHTS}{name}"


def state_key(name: str, what: str) -> str:
    """The key of what the optimizer keeps of a parameter."""
    return f"{OPTIMIZER}{name}:{what}"


def parts_of(program: Program) -> list[Part]:
    """Every weight and optimizer state of this rank, each of at least one element; call it between steps."""
    return [part for part in _parts(program) if part.values.numel()]


def states_of(program: Program) -> tuple[str, ...]:
    """What the optimizer keeps of a parameter, in its own words; () before its first step, and under plain SGD."""
    found = {
        what
        for kept in program.parameters
        for what, value in program.optimizer.state.get(kept.parameter, {}).items()
        if isinstance(value, Tensor)
    }
    return tuple(sorted(found))


def make_states(program: Program) -> None:
    """Let an optimizer that has not stepped make its states, by a step of zero gradients at a rate of zero."""
    _init_optim_state(program.optimizer)  # private: PyTorch's own way before it loads an optimizer
    program.data.after_step()


def _parts(program: Program) -> Iterator[Part]:
    experts = _expert_names(program)
    for kept in program.parameters:
        box = _box(kept.parameter, program, expert=kept.name in experts)
        yield from _placed(weights_key(kept.name), box, kept.parameter)
        for what, value in program.optimizer.state.get(kept.parameter, {}).items():
            if isinstance(value, Tensor):
                same = value.shape == kept.parameter.shape
                yield from _placed(state_key(kept.name, what), box if same else _whole(value), value)


def _placed(key: str, box: Box, tensor: Tensor) -> Iterator[Part]:
    """The values of a tensor; and the scales of one in 8 bits.

    Its largest code is 1 and its least -0.993 of the scale, so that values do not tell the scale of a block whose
    largest element is negative. A scale is that of a block of this very box: ranks with another one code anew.
    """
    values, coded = plain(local_part(tensor))
    assert tuple(values.shape) == box.sizes, f"{key} is {tuple(values.shape)} here and should be {box}"
    if not isinstance(getattr(coded, "qmap", None), Tensor):
        yield Part(key, box, values, coded)
        return
    corner, size = (",".join(map(str, numbers)) for numbers in (box.offsets, box.sizes))
    scales = f"{key}{SCALES}{corner}+{size}"
    yield Part(key, box, values, coded, scales)
    yield Part(scales, _whole(coded.scale), coded.scale)


def _nearest(values: Tensor, codebook: Tensor) -> Tensor:
    """The index of the nearest entry of an ascending codebook."""
    above = torch.searchsorted(codebook, values.contiguous()).clamp(1, len(codebook) - 1)
    lower = values - codebook[above - 1] < codebook[above] - values
    return above - lower.to(above.dtype)


def plain(local: Tensor) -> tuple[Tensor, Any]:
    """The values of a tensor in a plain one; and the tensor itself, where they are a copy of what it codes."""
    if type(local) in (Tensor, torch.nn.Parameter):
        return local.detach(), None
    inner = getattr(local, "_tensor", None)  # torchao's weights that FSDP2 gathers in FP8 keep theirs here
    if isinstance(inner, Tensor):
        return inner.detach(), None
    assert hasattr(local, "dequantize"), f"{type(local).__name__} is no tensor whose values are known"
    return local.dequantize(), local


def _whole(tensor: Tensor) -> Box:
    """A tensor that every rank has whole, such as a count of steps."""
    shape = tuple(tensor.shape)
    return Box((0,) * len(shape), shape, shape)


def _box(tensor: Tensor, program: Program, *, expert: bool) -> Box:
    """Where this rank's part of a parameter lies. Expert parallelism cut first, then tp, then data parallelism."""
    offsets, sizes, whole = [0] * tensor.dim(), list(tensor.shape), list(tensor.shape)
    for dim, index, ranks in _cuts(tensor):
        each = -(-sizes[dim] // ranks)
        first = min(index * each, sizes[dim])
        offsets[dim] += first
        sizes[dim] = min(each, sizes[dim] - first)
    ep = program.spec.plan["ep"]
    if expert and ep > 1:
        offsets[0] += program.world.place.ep * whole[0]
        whole[0] *= ep
    return Box(tuple(offsets), tuple(sizes), tuple(whole))


def _cuts(tensor: Tensor) -> Iterator[tuple[int, int, int]]:
    """(dimension, index of this rank's part, number of parts) of each cut of a parameter, in the order they were made.

    FSDP2 divides what tensor parallelism has left on a rank, though its axis comes first in the mesh.
    """
    if not isinstance(tensor, DTensor):
        return
    mesh = tensor.device_mesh
    names: Sequence[str] = mesh.mesh_dim_names or ()
    for axis in sorted(range(mesh.ndim), key=lambda axis: names[axis : axis + 1] != ("tp",)):
        placement = tensor.placements[axis]
        if not placement.is_replicate():
            dim: int = placement.dim  # pyright: ignore[reportAttributeAccessIssue]  # Shard, or FSDP2's strided one
            yield dim, mesh.get_local_rank(axis), mesh.size(axis)


def _expert_names(program: Program) -> set[str]:
    """Parameters that expert parallelism divides."""
    return {
        plain_name(f"{path}.experts.{name}")
        for decoder in program.decoders
        for path, module in decoder.named_modules()
        if isinstance(module, Moe)
        for name, _ in module.get_submodule("experts").named_parameters()
    }
