"""Expert parallelism: every rank owns some of the routed experts, and tokens travel to theirs and back.

The exchange is that of dropless routing: first each rank tells every other how many tokens its experts will get, then
the tokens go in pieces of those sizes. The way back mirrors it, and so does the backward, by the autograd that PyTorch
gives the collective. [torch: distributed/_functional_collectives.py]
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor

from trainledger.runtime.model.moe import Experts, Moe, visited
from trainledger.runtime.spec import RunSpec
from trainledger.runtime.world import World


def parallelize_experts(decoder: nn.Module, world: World, spec: RunSpec) -> None:
    """Leave each rank its own experts, and send tokens to the ranks that own theirs."""
    group = world.group("ep")
    if group is None:
        return
    for module in decoder.modules():
        if isinstance(module, Moe):
            experts = module.get_submodule("experts")
            held = _keep_own(experts, world.place.ep, spec.plan["ep"])
            module.dispatch = Exchange(group, held)


def _keep_own(experts: nn.Module, index: int, ranks: int) -> int:
    """Cut every stacked parameter [experts, ...] to the index-th of `ranks` equal parts, under the same name.

    Returns how many experts are left.
    """
    held: set[int] = set()
    for module in experts.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            own = parameter.detach().chunk(ranks)[index].clone()
            setattr(module, name, nn.Parameter(own, requires_grad=parameter.requires_grad))
            held.add(len(own))
    (count,) = held
    return count


class Exchange:
    """Runs every rank's tokens through the experts of all ranks of a group, `held` on each.

    The router's weights are applied to what comes back, where their own gradient needs it: a recomputed block makes
    every exchange of its forward again, whether it stops early or not.
    """

    def __init__(self, group: dist.ProcessGroup, held: int) -> None:
        self.group = group
        self.ranks = group.size()
        self.held = held

    def __call__(self, experts: Experts, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Rows [T, H], weights and chosen experts [T, k] to the weighted sums [T, H]."""
        run, count = partial(self.visit, experts), self.ranks * self.held
        return visited(run, count, rows, weights, chosen, scale_input=experts.rule.scale_input)

    def visit(self, experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows [N, H], sorted by expert, to what their experts make of them; `counts` says how many rows are whose."""
        leaving = counts.view(self.ranks, self.held)
        arriving = self._exchanged(counts).view_as(leaving)
        sent, got = _pieces(leaving, arriving, len(rows))
        received = self._exchanged(rows, got, sent)
        order = _by_expert(arriving, len(received))
        given = experts(received[order], arriving.sum(0))
        return self._exchanged(given[order.argsort()], sent, got)

    def _exchanged(self, rows: Tensor, got: list[int] | None = None, sent: list[int] | None = None) -> Tensor:
        """What the ranks send each other, in pieces of these sizes; None: in equal ones."""
        return wait_tensor(all_to_all_single_autograd(rows, got, sent, self.group))


def _pieces(leaving: Tensor, arriving: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """How many of the `rows` go to each rank and come from each, of counts [ranks, experts].

    The host waits here for the device. Fake tensors hold no counts; theirs are routed evenly, as in the ledger.
    """
    if isinstance(leaving, FakeTensor):
        ranks = len(leaving)
        even = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
        return even, even
    sent, got = torch.stack((leaving.sum(1), arriving.sum(1))).tolist()
    return sent, got


def _by_expert(arriving: Tensor, rows: int) -> Tensor:
    """Where the rows of each expert are among rows that lie by rank and then by expert.

    >>> _by_expert(torch.tensor([[1, 2], [2, 0]]), 5).tolist()
    [0, 3, 4, 1, 2]
    """
    ranks, experts = arriving.shape
    owner = torch.arange(experts, device=arriving.device).repeat(ranks)
    return owner.repeat_interleave(arriving.flatten(), output_size=rows).argsort(stable=True)
