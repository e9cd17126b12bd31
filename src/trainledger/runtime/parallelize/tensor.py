"""Tensor parallelism: matrices cut over the ranks of one mesh axis, with one exchange into and one out of each region.

A region is an attention layer or a network. Between its two exchanges every rank computes on plain tensors, its own
part of every parameter; parameters themselves are DTensors, so that whatever comes after (FSDP2, the optimizer, a
checkpoint) knows how they are cut.

| | forward in | forward out | backward in | backward out |
|---|---|---|---|---|
| without sp | - | all-reduce | - | all-reduce |
| with sp | all-gather | reduce-scatter | all-gather | reduce-scatter |

PyTorch's own column style lacks this: it reduces the gradient of each matrix's input on its own, leaves the gradient
of a vocabulary's table whole, and knows neither stacked experts nor norms within a region.
[torch: distributed/tensor/parallel/style.py]

Inside a region the gradient of what every rank holds whole (norms of q and k, MLA's down-projections, routers) is a
sum over the ranks, each of which has seen its own heads or features only. With sp so is that of everything outside
the regions, whose input is a slice of the sequence. These sums are taken together, once per optimizer step, by
`reduce_partial_gradients`: FSDP2 would take them parameter by parameter if it knew. The bias of a matrix that is cut
along its input is no such case: each rank adds its share of it, and sees the gradient of the whole output.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    PrepareModuleOutput,
    parallelize_module,
)

from trainledger.errors import Refused
from trainledger.facts.model import Model
from trainledger.facts.model import Tensor as Fact
from trainledger.runtime.model.block import Block
from trainledger.runtime.model.decoder import Decoder
from trainledger.runtime.model.semantics import MlpRule, MoeRule
from trainledger.runtime.model.tree import star
from trainledger.runtime.optimize import local_part
from trainledger.runtime.spec import RunSpec
from trainledger.runtime.tensors import kept_parameters, plain_name

SEQUENCE = 1
"""The dimension of hidden states [B, S, H] that sp cuts."""


def parallelize_tensor(decoder: Decoder, tp_mesh: DeviceMesh, spec: RunSpec) -> None:
    """Cut every parameter as its fact says and put the exchanges around the regions. Ranks must hold equal values."""
    facts = _facts_by_name(spec.model, decoder.block_paths)
    _refuse(decoder, facts, tp_mesh.size())
    _cut_parameters(decoder, tp_mesh, facts)
    outside = Shard(SEQUENCE) if spec.plan["sp"] else Replicate()
    plan = _Plan(decoder, tp_mesh, facts, outside)
    plan.ends(gather_logits=not spec.loss_parallel)
    for layer in decoder.blocks.values():
        assert isinstance(layer, Block)
        plan.block(layer)


def reduce_partial_gradients(*decoders: nn.Module) -> None:
    """Sum over the tensor-parallel ranks the gradients that are partial there: one all-reduce, if there is any.

    To be called once per optimizer step with all decoders of a rank, when the last backward has reduced what data
    parallelism reduces. The sums of shards are the shards of the sums, so under FSDP2 each rank sends its shards alone.
    """
    found = [part for decoder in decoders for part in _partial(decoder)]
    if not found:
        return
    gradients = [gradient for gradient, _ in found]
    together = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(together, group=found[0][1].get_group())
    for gradient, total in zip(gradients, together.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def _partial(decoder: nn.Module) -> Iterator[tuple[Tensor, DeviceMesh]]:
    """This rank's part of each partial gradient, and the ranks it is to be summed over."""
    meshes: dict[str, DeviceMesh] = {}
    for path, module in decoder.named_modules():
        local = vars(module).get("forward")
        if isinstance(local, _OnLocalParts):
            meshes |= {plain_name(f"{path}.{name}"): local.mesh for name in local.partial}
    for kept in kept_parameters(decoder):
        if kept.name in meshes and kept.parameter.grad is not None:
            yield local_part(kept.parameter.grad), meshes[kept.name]


def _refuse(decoder: Decoder, facts: Mapping[str, Fact], tp: int) -> None:
    """What a cut into equal, contiguous parts would get wrong."""
    rules = decoder.semantics
    moe = rules.moe or MoeRule(top_k=1)
    mlps = [rules.mlp, *([moe.shared] if moe.shared is not None else [])]
    norms = [fact for fact in facts.values() if fact.role == "norm" and fact.copies > 1]
    wrong = {
        "keeps q, k and v one after the other in one matrix": any(rule.qkv == "rows" for rule in rules.attention),
        "keeps gate and up one after the other in one matrix": moe.stacked == "halves"
        or any(mlp.kind == "fused" for mlp in mlps),
        "normalises q and k over all heads at once": any(rule.qk_norm == "wide" for rule in rules.attention),
        "has a norm of its own for each head": bool(norms),
    }
    for what, is_so in wrong.items():
        if is_so:
            raise Refused(
                "runtime-contiguous-tp", f"tp={tp} and the model {what}, which the program does not cut; set tp to 1"
            )


def _facts_by_name(model: Model, paths: dict[int, str]) -> dict[str, Fact]:
    """The fact behind each parameter of a decoder that holds these layers."""
    found = {star(fact.name): fact for fact in (*model.embedding, *model.final)}
    for block in model.blocks:
        for layer in block.layers:
            if layer in paths:
                found |= {f"{paths[layer]}.{star(fact.name)}": fact for fact in block.tensors}
    return found


def _cut_parameters(decoder: nn.Module, mesh: DeviceMesh, facts: dict[str, Fact]) -> None:
    """Every parameter becomes a DTensor under its name; one that two modules share stays one."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in decoder.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                fact = facts[f"{path}.{name}"]
                made[parameter] = _part(parameter, mesh, _placement(fact, parameter))
            module.register_parameter(name, made[parameter])


def _placement(fact: Fact, parameter: nn.Parameter) -> Placement:
    """Where a parameter is cut; a stack of experts has one dimension before those of the fact."""
    if fact.tp_dim is None:
        return Replicate()
    return Shard(fact.tp_dim + parameter.dim() - len(fact.shape))


def _part(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    own = parameter.detach()
    if isinstance(placement, Shard):
        size = own.shape[placement.dim]
        assert size % mesh.size() == 0, "the rule runtime-even-tp lets only equal parts pass"
        # a copy: a slice would keep the whole alive
        own = own.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()].clone(memory_format=torch.contiguous_format)
    shape, stride = parameter.shape, parameter.stride()
    whole = DTensor.from_local(own, mesh, [placement], run_check=False, shape=shape, stride=stride)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


class _Plan:
    """Applies styles to the modules of one decoder.

    outside   how hidden states lie between regions
    """

    def __init__(self, decoder: Decoder, mesh: DeviceMesh, facts: dict[str, Fact], outside: Placement) -> None:
        self._decoder = decoder
        self._mesh = mesh
        self._facts = facts
        self._outside = outside
        self._paths = {module: path for path, module in decoder.named_modules()}

    def ends(self, *, gather_logits: bool) -> None:
        """What comes before the first block and after the last."""
        table, *entry = self._decoder.entry or [None]
        if table is not None:
            self._apply(table, _OwnRows(), self._local(table), self._leave())
        *between, head = self._decoder.final or [None]
        for module in (*entry, *between):
            assert module is not None
            if isinstance(module, nn.Embedding) and self._outside != Replicate():
                self._apply(module, _OwnPositions())
            self._outer(module)
        if head is not None:
            self._apply(head, _EnterRegion(self._outside), self._local(head))
            if gather_logits:
                whole = PrepareModuleOutput(output_layouts=Shard(-1), desired_output_layouts=Replicate())
                self._apply(head, whole)

    def block(self, block: Block) -> None:
        """The two regions of a block, and the norms between them."""
        heads = self._mesh.get_local_rank() * block.attention.rule.heads // self._mesh.size()
        block.attention.first_head = heads
        inside: set[nn.Module] = set()
        for first, last in self._regions(block):
            self._apply(first, _EnterRegion(self._outside))
            for module in dict.fromkeys((first, last)):
                self._apply(module, self._local(module))
                inside.update(module.modules())
            self._apply(last, self._leave())
        for module in block.modules():
            if module not in inside:
                self._outer(module)

    def _regions(self, block: Block) -> Iterator[tuple[nn.Module, nn.Module]]:
        """(first module, last module) of attention and network."""
        yield block.attention, block.attention
        rule = block.network_rule
        if isinstance(rule, MlpRule) and not rule.path:
            yield block.get_submodule(rule.up), block.get_submodule(rule.down)
        else:
            network = block.get_submodule(rule.path)
            yield network, network

    def _outer(self, module: nn.Module) -> None:
        """A module that works on hidden states as they lie outside; with sp it sees a slice of the sequence."""
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if own:
            partial = () if self._outside == Replicate() else own
            self._apply(module, _Local([(module, name, False) for name in own], partial))

    def _local(self, region: nn.Module) -> _Local:
        """A region's own part of everything below it."""
        places: list[tuple[nn.Module, str, bool]] = []
        partial: list[str] = []
        for path, module in region.named_modules():
            for name, _ in module.named_parameters(recurse=False):
                below = f"{path}.{name}" if path else name
                shared = self._shared_bias(f"{self._paths[module]}.{name}")
                places.append((module, name, shared))
                if not shared and self._whole(f"{self._paths[module]}.{name}"):
                    partial.append(below)
        return _Local(places, partial)

    def _whole(self, name: str) -> bool:
        """Whether every rank holds all of a parameter; the output layer of a tied model has the table's fact."""
        return name in self._facts and self._facts[name].tp_dim is None

    def _shared_bias(self, name: str) -> bool:
        """Whether this is the whole bias of a matrix that is cut: along its input, then."""
        weight = f"{name.removesuffix('.bias')}.weight" if name.endswith(".bias") else name.removesuffix("_bias")
        return weight != name and self._whole(name) and not self._whole(weight)

    def _leave(self) -> ParallelStyle:
        return PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=self._outside)

    def _apply(self, module: nn.Module, *styles: ParallelStyle) -> None:
        for style in styles:
            parallelize_module(module, self._mesh, style)


class _EnterRegion(ParallelStyle):
    """The way into a region: its first input whole on every rank, the gradient of it a sum over them.

    PyTorch's own style hands on local tensors only where their gradients are whole. [torch: PrepareModuleInput]
    """

    def __init__(self, outside: Placement) -> None:
        self._outside = outside

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            outside = DTensor.from_local(given[0], device_mesh, [self._outside], run_check=False)
            whole = outside.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            return (whole, *given[1:])

        module.register_forward_pre_hook(enter)
        return module


class _Local(ParallelStyle):
    """A module that computes on this rank's part of its parameters; places as in _OnLocalParts."""

    def __init__(self, places: Iterable[tuple[nn.Module, str, bool]], partial: Iterable[str]) -> None:
        self._places = [_Place(*place) for place in places]
        self._partial = tuple(partial)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.forward = _OnLocalParts(module.forward, device_mesh, self._places, self._partial)
        return module


class _Place(NamedTuple):
    """A parameter by its module and name; `shared`: every rank adds an equal share of it to a sum."""

    module: nn.Module
    name: str
    shared: bool


class _OnLocalParts:
    """A module's forward with this rank's part of each parameter in its place while it runs.

    partial   names, below the module, of parameters whose gradient is a sum over the ranks
    """

    def __init__(
        self, forward: Callable[..., object], mesh: DeviceMesh, places: list[_Place], partial: tuple[str, ...]
    ) -> None:
        self._forward = forward
        self._places = places
        self.mesh = mesh
        self.partial = partial

    def __call__(self, *args: object, **kwargs: object) -> object:
        with self._swapped():
            return self._forward(*args, **kwargs)

    @contextmanager
    def _swapped(self) -> Generator[None]:
        """FSDP2 puts other tensors under the same names from one call to the next, so they are looked up each time."""
        # the dictionary of a module takes tensors that are no parameters, which its attributes do not
        held = [(place.module._parameters, place.name, place.shared) for place in self._places]
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


class _OwnRows(ParallelStyle):
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


class _OwnPositions(ParallelStyle):
    """A table of positions that is asked for those of this rank's slice of the sequence only."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def slice_of(_: nn.Module, ids: tuple[Tensor]) -> tuple[Tensor]:
            return (ids[0].chunk(device_mesh.size())[device_mesh.get_local_rank()],)

        module.register_forward_pre_hook(slice_of)
        return module
