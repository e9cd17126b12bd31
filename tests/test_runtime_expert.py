"""Expert parallelism gives the gradients of a single process, and puts on the wire what the ledger says."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

from parallel_runs import (
    CHECKED,
    Batch,
    Gradients,
    batch_of,
    fresh,
    joined,
    observed,
    predicted,
    routed,
    spec_of,
    trained,
    worst,
    wrapped,
)
from trainledger.runtime.launch.fork import run_forked
from trainledger.runtime.model import Decoder
from trainledger.runtime.observe.observation import Call
from trainledger.runtime.parallelize.expert import parallelize_experts
from trainledger.runtime.spec import RunSpec
from trainledger.runtime.world import World

CPU = torch.device("cpu")
BIASED = "biased"
"""A Mixtral whose routers choose among experts 1 to 4 of 8: the others, and of 4 ranks the last, get nothing."""


def biased(decoder: Decoder) -> None:
    """Make two pairs of opposite rows of each router and leave the others zero: one of each pair is above zero."""
    for block in decoder.blocks.values():
        rows = block.get_parameter("block_sparse_moe.gate.weight").detach()
        first, second = rows[1].clone(), rows[3].clone()
        rows.zero_()
        rows[1], rows[2], rows[3], rows[4] = first, -first, second, -second


def run_of(model: str, plan: dict[str, int], recompute: str, **fields: object) -> RunSpec:
    """The run of a model; `seed` tells a biased one."""
    kind, seed = ("routed", 1) if model == BIASED else (model, 0)
    return spec_of(kind, plan, recompute=recompute, seed=seed, **fields)


def decoder_of(spec: RunSpec) -> Decoder:
    """The whole decoder of a run."""
    return fresh(spec, biased if spec.seed else None)


def expert_runs(rank: int, specs: list[RunSpec]) -> list[dict[int, Gradients]]:
    """The checked gradients of each run on this rank, its own experts alone."""
    world = World(specs[0], CPU)
    return [_expert_run(rank, world, spec) for spec in specs]


def _expert_run(rank: int, world: World, spec: RunSpec) -> dict[int, Gradients]:
    ranks, ep = spec.plan["dp_shard"], spec.plan["ep"]
    decoder = decoder_of(spec)
    parallelize_experts(decoder, world, spec)
    wrapped(decoder, spec)
    copies = world.expert_replica_mesh.get_group() if ranks > ep else None

    def batch(step: int) -> Batch:
        tokens, labels = batch_of(spec, step, ranks)
        return tokens[rank : rank + 1], labels[rank : rank + 1]

    def average(decoder: Decoder) -> None:
        """Of experts too the sum over all tokens is divided by all ranks: most of it came with the tokens."""
        for name, parameter in decoder.named_parameters():
            assert parameter.grad is not None
            if not routed(name):
                dist.all_reduce(parameter.grad)
            elif copies is not None:
                dist.all_reduce(parameter.grad, group=copies)
            parameter.grad /= ranks

    return trained(decoder, batch, average)


@pytest.mark.parametrize(
    ("ranks", "ep", "models"),
    [(2, 2, ("routed", "latent", BIASED)), (4, 4, ("latent", BIASED)), (4, 2, ("latent", BIASED))],
)
def test_every_gradient_is_that_of_a_single_process(ranks: int, ep: int, models: tuple[str, ...]) -> None:
    """Mixtral, DeepSeek-V2 with its shared experts, and routers that leave experts and ranks without a token."""
    specs = [run_of(model, {"dp_shard": ranks, "ep": ep}, "none" if model == "routed" else "full") for model in models]
    runs = run_forked(ranks, expert_runs, specs)
    for index, (model, spec) in enumerate(zip(models, specs, strict=True)):
        whole = trained(decoder_of(spec), lambda step, spec=spec: batch_of(spec, step, ranks))
        found = {step: joined([run[index][step] for run in runs[:ep]]) for step in CHECKED}
        assert worst(found, whole) < (1e-5,), model
        if model == BIASED:
            _check_who_gets_nothing(found[CHECKED[0]])


def _check_who_gets_nothing(found: Gradients) -> None:
    stacks = [gradient for name, gradient in found.items() if routed(name)]
    assert len(stacks) == 6
    for gradient in stacks:
        assert gradient[1:5].any(axis=(1, 2)).all()
        assert not gradient[0].any()
        assert not gradient[5:].any()


def exchanges(rank: int, specs: list[RunSpec]) -> list[list[Call]]:
    """The collectives of each run's step."""
    found: list[list[Call]] = []
    world = World(specs[0], CPU)
    for spec in specs:
        decoder = decoder_of(spec)
        parallelize_experts(decoder, world, spec)
        batch = partial(_own_batch, rank, spec)
        found.append(observed(wrapped(decoder, spec), spec, world.names, batch))
    return found


def _own_batch(rank: int, spec: RunSpec, index: int) -> Batch:
    return batch_of(spec, 100 * rank + index, spec.plan["mbs"])


def test_the_ledger_knows_every_exchange() -> None:
    """Counts to the byte on every rank. Tokens to the call; their bytes are the ledger's on all ranks together.

    A rank gives back what its experts were sent, so what it passes in and gets out in a step is the same.
    """
    ep = 4
    plan = {"dp_shard": ep, "ep": ep, "num_microbatches": 2, "mbs": 2}
    specs = [
        run_of(BIASED, plan, "none"),
        run_of("latent", plan, "full"),
        run_of("routed", plan, "full", early_stop=False),
    ]
    runs = run_forked(ep, exchanges, specs)
    for index, spec in enumerate(specs):
        tokens, counts = predicted(spec, "ep")
        ranks = [run[index] for run in runs]
        assert [calls[1] for calls in ranks] == [counts] * ep
        assert [(calls[0].dtype, calls[0].count) for calls in ranks] == [(tokens.dtype, tokens.count)] * ep
        assert all(calls[0].in_bytes == calls[0].out_bytes >= tokens.in_bytes // 2 for calls in ranks)
        assert sum(calls[0].in_bytes for calls in ranks) == ep * tokens.in_bytes
        assert len({calls[0].in_bytes for calls in ranks}) > 1, "a routing that is balanced by chance proves nothing"
