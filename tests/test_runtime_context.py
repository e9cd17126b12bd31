"""Context parallelism gives the gradients of a single process, and puts on the wire what the ledger says."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
import torch
import torch.distributed as dist

from parallel_runs import (
    CHECKED,
    Batch,
    Gradients,
    batch_of,
    fresh,
    observed,
    predicted,
    spec_of,
    trained,
    worst,
    wrapped,
)
from trainledger.errors import Refused
from trainledger.runtime.launch.fork import run_forked
from trainledger.runtime.model import Decoder
from trainledger.runtime.model.attention import Attention
from trainledger.runtime.observe.observation import Call
from trainledger.runtime.parallelize.context import Ring, parallelize_context, split_sequence
from trainledger.runtime.spec import RunSpec
from trainledger.runtime.world import World

CPU = torch.device("cpu")


def ring_runs(rank: int, specs: list[RunSpec]) -> list[dict[int, Gradients]]:
    """The checked gradients of each run, averaged over the ranks."""
    world = World(specs[0], CPU)
    return [_ring_run(rank, world, spec) for spec in specs]


def _ring_run(rank: int, world: World, spec: RunSpec) -> dict[int, Gradients]:
    cp = spec.plan["cp"]
    decoder = fresh(spec)
    parallelize_context(decoder, world, spec)

    def average(decoder: Decoder) -> None:
        for parameter in decoder.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= cp

    found = trained(wrapped(decoder, spec), own_batch(rank, spec, 2), average, own_positions(rank, spec))
    return found if rank == 0 else {}


def own_batch(rank: int, spec: RunSpec, sequences: int) -> Callable[[int], Batch]:
    """This rank's part of the batch of each step."""

    def batch(step: int) -> Batch:
        tokens, labels = (split_sequence(part, 1, rank, spec.plan["cp"]) for part in batch_of(spec, step, sequences))
        return tokens, labels

    return batch


def own_positions(rank: int, spec: RunSpec) -> torch.Tensor:
    """Where this rank's tokens stand in their sequences."""
    return split_sequence(torch.arange(spec.seq), 0, rank, spec.plan["cp"])


@pytest.mark.parametrize("cp", [2, 4])
def test_every_gradient_is_that_of_a_single_process(cp: int) -> None:
    """Grouped and latent heads, both rotations, steps 1 and 10 of SGD; recomputed blocks too."""
    specs = [
        spec_of(kind, {"cp": cp}, cp_comm=rotation, recompute=recompute)
        for kind, rotation, recompute in (
            ("grouped", "ring", "none"),
            ("grouped", "all_gather", "full"),
            ("latent", "ring", "full"),
            ("latent", "all_gather", "none"),
        )
    ]
    runs = run_forked(cp, ring_runs, specs)[0]
    for spec, found in zip(specs, runs, strict=True):
        whole = trained(fresh(spec), lambda step, spec=spec: batch_of(spec, step, 2))
        assert set(found) == set(CHECKED)
        assert worst(found, whole) < (1e-5,), (spec.model.name, spec.cp_comm)


def exchanges(rank: int, specs: list[RunSpec]) -> list[list[Call]]:
    """The collectives of each run's step."""
    found: list[list[Call]] = []
    world = World(specs[0], CPU)
    for spec in specs:
        decoder = fresh(spec).to(torch.bfloat16 if spec.precision == "bf16" else torch.float32)
        parallelize_context(decoder, world, spec)
        batch = own_batch(rank, spec, spec.plan["mbs"])
        found.append(observed(wrapped(decoder, spec), spec, world.names, batch, own_positions(rank, spec)))
    return found


def test_the_ledger_knows_every_exchange() -> None:
    """By kind, count, dtype and bytes, on every rank; a recomputed block exchanges again, stopped early or not."""
    plan = {"cp": 4, "num_microbatches": 2, "mbs": 2}
    specs = [
        spec_of("grouped", plan, cp_comm="ring"),
        spec_of("grouped", plan, cp_comm="all_gather", recompute="full", precision="bf16"),
        spec_of("latent", plan, cp_comm="ring", recompute="full"),
        spec_of("latent", plan, cp_comm="all_gather", recompute="full", early_stop=False),
    ]
    for ranks in run_forked(4, exchanges, specs):
        for spec, calls in zip(specs, ranks, strict=True):
            assert calls == predicted(spec, "cp"), (spec.model.name, spec.cp_comm)


def test_every_rank_has_a_piece_of_the_front_and_one_of_the_back() -> None:
    parts = [split_sequence(torch.arange(16).view(2, 8), 1, rank, 4).tolist() for rank in range(4)]
    assert parts[0] == [[0, 7], [8, 15]]
    assert parts[3] == [[3, 4], [11, 12]]
    with pytest.raises(AssertionError, match="cp-seq"):
        split_sequence(torch.arange(6), 0, 0, 2)


def test_what_a_ring_cannot_do_is_refused() -> None:
    """A layer with a mask of its own, told by its rule; and fp32 on CUDA, for which there is no flash kernel."""
    spec = spec_of("grouped", {"cp": 2})
    decoder = fresh(spec)
    world = cast("World", SimpleNamespace(group={"cp": object()}.get, device=torch.device("cuda")))
    with pytest.raises(Refused, match=r"\[cp-flash\] cp=2 .* --precision bf16"):
        parallelize_context(decoder, world, spec)
    world.device = CPU
    parallelize_context(decoder, world, spec)
    layer = decoder.get_submodule("model.layers.1.self_attn")
    assert isinstance(layer, Attention)
    assert isinstance(layer.attend, Ring)
    assert decoder.length == spec.seq
    layer.rule = msgspec.structs.replace(layer.rule, window=spec.seq)
    parallelize_context(decoder, world, spec)
    layer.rule = msgspec.structs.replace(layer.rule, window=spec.seq - 1)
    with pytest.raises(Refused, match=r"\[cp-causal\] cp=2 .* model\.layers\.1\.self_attn of llama-3-8b .* --cp 1"):
        parallelize_context(decoder, world, spec)
