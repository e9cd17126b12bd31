"""Data parallelism: DDP, replicas by unit, and ZeRO-1, 2 and 3 from one table of FSDP2 knobs.

Units are what is gathered and reduced at once: the embedding, each block, and what follows the last block. With a tied
output layer on the same ranks the embedding and what follows the last block are one unit, for they share a weight.
Routed experts are a unit of their own where expert parallelism gives them other ranks.

| zero_stage | weights after a forward | after a backward | gradients are reduced |
|---|---|---|---|
| 0 | whole, always | whole | at the last micro-batch |
| 1 | gathered until the step ends | gathered | at the last micro-batch |
| 2 | gathered until the step ends | gathered | after every micro-batch |
| 3 | resharded | resharded | after every micro-batch |

In a pipeline weights stay gathered and gradients are reduced once per step at every zero_stage above 0, as PyTorch's
schedules ask: `pipeline` turns those knobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from trainledger.runtime.model import Decoder
from trainledger.runtime.model.moe import Moe
from trainledger.runtime.precision.dtypes import mixed_precision
from trainledger.runtime.spec import RunSpec
from trainledger.runtime.watch import Watch
from trainledger.runtime.world import World


def units(decoder: Decoder) -> Iterator[list[nn.Module]]:
    """The modules of each unit, in forward order; tied ends come first, as one."""
    entry, final = decoder.entry, decoder.final
    tied = bool(_parameters(entry) & _parameters(final))
    if tied:
        yield [*entry, *final]
    elif entry:
        yield entry
    yield from ([block] for block in decoder.blocks.values())
    if final and not tied:
        yield final


def _parameters(modules: list[nn.Module]) -> set[nn.Parameter]:
    return {parameter for module in modules for parameter in module.parameters()}


REDUCER = ("buffers", "reducer buckets")
"""What DDP's storages are called: no tensor that Python can name uses them."""


class DataParallel:
    """The data-parallel half of a program: wraps decoders, then turns the knobs of each micro-batch.

    With one rank and fp32 nothing is wrapped; under any other precision FSDP2 casts even for one rank.
    """

    def __init__(self, spec: RunSpec, world: World, watch: Watch) -> None:
        self.spec = spec
        self.world = world
        self.watch = watch
        self.zero_stage = spec.plan["zero_stage"]
        plan = spec.plan
        pure = plan["tp"] == plan["pp"] == plan["cp"] == plan["ep"] == 1
        self.ddp = self.zero_stage == 0 and pure and spec.precision == "fp32" and world.num_averaging > 1
        self.by_unit = not self.ddp and (world.num_averaging > 1 or spec.precision != "fp32")
        self._wrapped: list[nn.Module] = []

    def wrap(self, decoder: Decoder) -> nn.Module:
        """The decoder, ready for data parallelism."""
        wrapped: nn.Module = decoder
        if self.ddp:
            wrapped = self._replicas(decoder)
        elif self.by_unit:
            self._wrap_units(decoder)
        self._wrapped.append(wrapped)
        return wrapped

    def _replicas(self, decoder: Decoder) -> DistributedDataParallel:
        """DDP, whose buckets are made in C++, here and once more when it knows the order of gradients."""
        with self.watch.labelled(*REDUCER):
            replicas = DistributedDataParallel(
                decoder, process_group=self.world.replica_mesh.get_group(), init_sync=False
            )
        rebuild = replicas._pre_forward  # private: where the buckets are made anew

        def labelled(*inputs: object, **given: object) -> object:
            with self.watch.labelled(*REDUCER):
                return rebuild(*inputs, **given)

        replicas._pre_forward = labelled  # pyright: ignore[reportAttributeAccessIssue]  # it passes on what it is given
        return replicas

    def _wrap_units(self, decoder: Decoder) -> None:
        for module in decoder.modules():
            if isinstance(module, Moe) and self.spec.plan["ep"] > 1:
                experts = module.get_submodule("experts")
                self._wrap_one([experts], expert=True)
                # every token of the job counts once, on whichever rank its expert lives
                assert isinstance(experts, FSDPModule)
                experts.set_gradient_divide_factor(float(self.world.num_averaging))
                # gloo has no reduction that scales as it sums; FSDP2 that scales by itself divides twice over one rank
                experts.set_force_sum_reduction_for_comms(
                    self.zero_stage > 0 and self.world.expert_shard_mesh.size(-1) > 1
                )
        for unit in units(decoder):
            self._wrap_one(unit, expert=False)
        self._wrap_one([decoder], expert=False)
        for module in self._fsdp_modules(decoder):
            module.set_reshard_after_backward(self.zero_stage in (0, 3), recurse=False)

    def _wrap_one(self, unit: list[nn.Module], *, expert: bool) -> None:
        target = unit[0] if len(unit) == 1 else unit
        if self.zero_stage == 0:
            mesh = self.world.expert_replica_mesh if expert else self.world.replica_mesh
            replicate(target, mesh=mesh, mp_policy=self._precision)
            return
        mesh = self.world.expert_shard_mesh if expert else self.world.shard_mesh
        fully_shard(
            target,
            mesh=mesh,
            mp_policy=self._precision,
            reshard_after_forward=self.zero_stage == 3,
            shard_placement_fn=_placement(mesh),
        )

    @property
    def _precision(self) -> MixedPrecisionPolicy:
        return mixed_precision(self.spec.precision)

    def _fsdp_modules(self, module: nn.Module) -> Iterator[FSDPModule]:
        return (part for part in module.modules() if isinstance(part, FSDPModule))

    def before_micro_batch(self, *, last: bool) -> None:
        """Whether the backward that comes reduces gradients."""
        sync = last or self.zero_stage in (2, 3)
        for wrapped in self._wrapped:
            if isinstance(wrapped, DistributedDataParallel):
                wrapped.require_backward_grad_sync = sync
            else:
                for module in self._fsdp_modules(wrapped):
                    module.set_requires_gradient_sync(sync, recurse=False)

    def after_step(self) -> None:
        """Shard what is still gathered. `FSDPModule.reshard` does not reach the modules inside, so each is told.

        Without this, the next forward would run on the weights from before the step, with no error.
        """
        for wrapped in self._wrapped:
            for module in self._fsdp_modules(wrapped):
                module.reshard()


def _placement(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard | None]:
    """Where FSDP2 cuts a parameter: stacked experts between experts, or their rows where more ranks share them."""
    ranks = mesh.size(-1)

    def place(parameter: nn.Parameter) -> Shard | None:
        stacked = parameter.dim() == 3
        return Shard(1) if stacked and ranks > parameter.shape[0] else None

    return place
