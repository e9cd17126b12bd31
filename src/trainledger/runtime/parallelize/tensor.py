"""Tensor parallelism: matrices cut over the ranks of one mesh axis, with one exchange into and one out of each region.

A region is an attention layer or a network. Between its two exchanges every rank computes on plain tensors, its own
part of every parameter; parameters themselves are DTensors, so that whatever comes after (FSDP2, the optimizer, a
checkpoint) knows how they are cut.

| | forward in | forward out | backward in | backward out |
|---|---|---|---|---|
| without sp | - | all-reduce | - | all-reduce |
| with sp | all-gather | reduce-scatter | all-gather | reduce-scatter |

PyTorch's own styles lack this: the column style reduces the gradient of each matrix's input on its own, the row style
leaves the gradient of a vocabulary's table whole, and none knows stacked experts or norms within a region.
[torch: distributed/tensor/parallel/style.py]

Inside a region the gradient of what every rank holds whole (norms of q and k, MLA's down-projections, routers) is a
sum over the ranks, each of which has seen its own heads or features only. With sp so is that of everything outside
the regions, whose input is a slice of the sequence. These sums are taken together, once per optimizer step, by
`reduce_partial_gradients`: FSDP2 would take them parameter by parameter if it knew. The bias of a matrix that is cut
along its input is no such case: each rank adds its share of it, and sees the gradient of the whole output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from trainledger.errors import Refused
from trainledger.facts.model import Model
from trainledger.facts.model import Tensor as Fact
from trainledger.facts.semantics import MlpRule, MoeRule
from trainledger.runtime.model.block import Block
from trainledger.runtime.model.decoder import Decoder
from trainledger.runtime.model.tree import star
from trainledger.runtime.observe.tensors import local_part
from trainledger.runtime.parallelize.styles import Enter, Leave, Local, OnLocalParts, OwnPositions, OwnRows, Spot
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
        if isinstance(local, OnLocalParts):
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
            self._apply(table, OwnRows(), self._local(table), Leave(self._outside))
        *between, head = self._decoder.final or [None]
        for module in (*entry, *between):
            assert module is not None
            if isinstance(module, nn.Embedding) and self._outside != Replicate():
                self._apply(module, OwnPositions())
            self._outer(module)
        if head is not None:
            self._apply(head, Enter(self._outside), self._local(head))
            if gather_logits:
                self._apply(head, Leave(Replicate(), inside=Shard(-1)))

    def block(self, block: Block) -> None:
        """The two regions of a block, and the norms between them."""
        heads = self._mesh.get_local_rank() * block.attention.rule.heads // self._mesh.size()
        block.attention.first_head = heads
        inside: set[nn.Module] = set()
        for first, last in self._regions(block):
            self._apply(first, Enter(self._outside))
            for module in dict.fromkeys((first, last)):
                self._apply(module, self._local(module))
                inside.update(module.modules())
            self._apply(last, Leave(self._outside))
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
            self._apply(module, Local([Spot(module, name) for name in own], partial))

    def _local(self, region: nn.Module) -> Local:
        """A region's own part of everything below it."""
        spots: list[Spot] = []
        partial: list[str] = []
        for path, module in region.named_modules():
            for name, _ in module.named_parameters(recurse=False):
                below = f"{path}.{name}" if path else name
                shared = self._shared_bias(f"{self._paths[module]}.{name}")
                spots.append(Spot(module, name, shared=shared))
                if not shared and self._whole(f"{self._paths[module]}.{name}"):
                    partial.append(below)
        return Local(spots, partial)

    def _whole(self, name: str) -> bool:
        """Whether every rank holds all of a parameter; the output layer of a tied model has the table's fact."""
        return name in self._facts and self._facts[name].tp_dim is None

    def _shared_bias(self, name: str) -> bool:
        """Whether this is the whole bias of a matrix that is cut: along its input, then."""
        weight = f"{name.removesuffix('.bias')}.weight" if name.endswith(".bias") else name.removesuffix("_bias")
        return weight != name and self._whole(name) and not self._whole(weight)

    def _apply(self, module: nn.Module, *styles: ParallelStyle) -> None:
        for style in styles:
            parallelize_module(module, self._mesh, style)
