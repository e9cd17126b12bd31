"""Pipeline parallelism: this rank's stages under one of PyTorch's schedules, one call per optimizer step.

What a schedule asks of data parallelism is PyTorch's own: no backward reduces or reshards, and once the last backward
of a stage is done all its units reduce and reshard. So at every zero_stage a unit is gathered and reduced once per
optimizer step, and its gradients are whole in between.
[torch: distributed/pipelining/stage.py backward_maybe_with_nosync, perform_reduce_grad]

Nothing is exchanged but boundary tensors: their shapes are known beforehand, and the vote by which PyTorch would find
that out is left out, in the first step too.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule
from torch.distributed.fsdp import FSDPModule

from trainledger.plans.split import chunks_of
from trainledger.runtime.observe.tensors import local_part
from trainledger.runtime.parallelize.schedules import Loss, Stage, build_schedule
from trainledger.runtime.precision.dtypes import activation_dtype
from trainledger.runtime.spec import RunSpec
from trainledger.runtime.tensors import Named, plain_name
from trainledger.runtime.world import World


class Pipeline:
    """The virtual stages of one rank and their schedule.

    decoders    this rank's stages in order, cut and wrapped
    loss        (logits of a micro-batch, its labels) to the mean over its tokens
    positions   [tokens of this rank]: where they stand in the sequence, which only the first stage could count
    """

    def __init__(
        self,
        decoders: Sequence[nn.Module],
        spec: RunSpec,
        world: World,
        loss: Loss,
        positions: torch.Tensor,
    ) -> None:
        plan = spec.plan
        self._is_first = world.place.pp == 0
        self.is_last = world.place.pp == plan["pp"] - 1
        self.positions = positions
        self._boundary = boundary_of(spec)
        self._world = world
        chunks = chunks_of(world.place.pp, plan["pp"], plan["vpp"])
        self._stages = [_stage(*pair, spec, world) for pair in zip(decoders, chunks, strict=True)]
        batches = plan["num_microbatches"]

        def share(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return loss(logits, labels) / batches

        self._schedule = build_schedule(spec.schedule, self._stages, batches, share)

    def step(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor | None:
        """Forward and backward of all micro-batches, [num_microbatches x mbs, tokens] each.

        The mean loss of this rank's tokens on the last stage, None elsewhere. Gradients are those of that mean.
        """
        inputs = (tokens,) if self._is_first else ()
        losses: list[torch.Tensor] = []
        target = labels if self.is_last else None
        self._schedule.step(*inputs, target=target, losses=losses, return_outputs=False, positions=self.positions)
        return torch.stack([loss.detach() for loss in losses]).sum() if self.is_last else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Logits of one micro-batch [mbs, tokens of this rank] on the last stage, None elsewhere; no gradients.

        One micro-batch after the other, each through all chunks in order: a stage that has passed one on takes the
        next while the later stages work.
        """
        group, place, pp = self._world.group("pp"), self._world.place.pp, self._world.plan["pp"]
        hidden = tokens
        for stage in self._stages:
            if not stage.is_first:
                hidden = self._boundary.new_empty(self._boundary.shape, device=self._world.device)
                dist.recv(hidden, group=group, group_src=(place - 1) % pp)
            hidden = stage.submod(hidden, positions=self.positions)
            if not stage.is_last:
                dist.send(hidden.contiguous(), group=group, group_dst=(place + 1) % pp)
        return hidden if self.is_last else None

    def received(self) -> Iterator[Named]:
        """What boundary tensors are received into: for every micro-batch one of its own, from the first step on.

        A chunk that is not the first gets num_microbatches inputs, one that is not the last as many gradients.
        """
        for stage in self._stages:
            for what, of_batches in (("input", stage.args_recv_info), ("output gradient", stage.grad_recv_info)):
                for batch, arguments in of_batches.items():
                    for argument in arguments:
                        if argument.buffer is not None:
                            name = f"received {what} of chunk {stage.stage_index}, micro-batch {batch}"
                            yield Named("buffers", name, argument.buffer)


def boundary_of(spec: RunSpec) -> torch.Tensor:
    """What travels between stages, without memory: [mbs, tokens of a rank, hidden] in the dtype of activations."""
    plan = spec.plan
    tokens = spec.seq // (plan["cp"] * (plan["tp"] if plan["sp"] else 1))
    shape = plan["mbs"], tokens, spec.model.hidden_size
    return torch.empty(shape, dtype=activation_dtype(spec.precision), device="meta", requires_grad=True)


def _stage(decoder: nn.Module, chunk: int, spec: RunSpec, world: World) -> Stage:
    """A stage whose boundary tensors are known."""
    _keep_gathered(decoder)
    plan = spec.plan
    chunks = plan["pp"] * plan["vpp"]
    hidden = boundary_of(spec)
    ids = torch.empty(plan["mbs"], spec.seq // plan["cp"], dtype=torch.int64, device="meta")
    # what leaves the last stage goes to the loss, so that PyTorch asks only whether there is a description
    return Stage(
        decoder,
        chunk,
        chunks,
        world.device,
        input_args=ids if chunk == 0 else hidden,
        output_args=hidden,
        group=world.group("pp"),
    )


def _keep_gathered(decoder: nn.Module) -> None:
    """Units stay gathered between a forward and its backward.

    A schedule's backward gathers what a forward has resharded and keeps it, so that resharding saves no memory at the
    peak and costs num_microbatches more gathers; and the split backward of zero-bubble finds no parameter that is
    sharded when it begins, and drops its gradient without a word.
    [torch: distributed/pipelining/_backward.py stage_backward_input]
    """
    if isinstance(decoder, FSDPModule) and not isinstance(decoder, ReplicateModule):
        decoder.set_reshard_after_forward(False)


def reduce_tied_embedding(decoders: Sequence[nn.Module], names: Container[str], group: dist.ProcessGroup) -> None:
    """Sum the gradient of the embedding that the first and the last stage both hold, each rank its own part of it.

    names  of its parameters

    To be called once per step, when gradients are reduced over data-parallel ranks. A stage between has nothing to sum.
    """
    for decoder in decoders:
        for name, parameter in decoder.named_parameters():
            if plain_name(name) in names and parameter.grad is not None:
                dist.all_reduce(local_part(parameter.grad), group=group)
