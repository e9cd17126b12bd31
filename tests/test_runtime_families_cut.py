"""Every family of decoders, cut over context and over expert ranks: its gradients, and its exchanges by the ledger."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from model_cases import CASES, facts
from parallel_runs import (
    SEQ,
    Batch,
    Gradients,
    batch_of,
    differences,
    fresh,
    gradients,
    joined,
    observed,
    predicted,
    routed,
    run_spec,
    wrapped,
)
from trainledger.errors import Refused
from trainledger.runtime.launch.fork import run_forked
from trainledger.runtime.observe.observation import Call
from trainledger.runtime.parallelize.context import parallelize_context, split_sequence
from trainledger.runtime.parallelize.expert import parallelize_experts
from trainledger.runtime.spec import RunSpec
from trainledger.runtime.world import World

POLICIES: tuple[dict[str, object], ...] = (
    {"recompute": "none", "cp_comm": "ring"},
    {"recompute": "full", "cp_comm": "all_gather"},
)

Outcome = tuple[Gradients, list[Call]] | None
"""Gradients averaged over the ranks and the collectives of a step; None: refused."""


def specs_of(plan: dict[str, int], *, moe: bool) -> list[RunSpec]:
    """Every case under every policy."""
    found: list[RunSpec] = []
    for case, config in CASES.items():
        model = facts(case)
        if not moe or any(block.moe for block in model.blocks):
            found += [run_spec(config, model, plan, **policy) for policy in POLICIES]
    return found


def outcomes(rank: int, specs: list[RunSpec]) -> list[Outcome]:
    """What each run gives on this rank; its own experts alone."""
    world = World(specs[0], torch.device("cpu"))
    return [_outcome(rank, world, spec) for spec in specs]


def _outcome(rank: int, world: World, spec: RunSpec) -> Outcome:
    decoder = fresh(spec)
    try:
        parallelize_context(decoder, world, spec)
    except Refused:
        return None
    parallelize_experts(decoder, world, spec)
    positions = _part(torch.arange(SEQ)[None], rank, spec)[0]
    batch = _own(batch_of(spec, 0, 2), rank, spec)
    calls = observed(wrapped(decoder, spec), spec, world.names, lambda _: batch, positions)
    for name, parameter in decoder.named_parameters():
        if parameter.grad is not None:
            if spec.plan["cp"] > 1 or not routed(name):
                dist.all_reduce(parameter.grad)
            parameter.grad /= 2
    return gradients(decoder), calls


def _own(batch: Batch, rank: int, spec: RunSpec) -> Batch:
    """This rank's half: of each sequence, or of the sequences."""
    tokens, labels = (_part(part, rank, spec) for part in batch)
    return tokens, labels


def _part(rows: torch.Tensor, rank: int, spec: RunSpec) -> torch.Tensor:
    if spec.plan["cp"] > 1:
        return split_sequence(rows, 1, rank, 2)
    return rows[rank : rank + 1] if len(rows) > 1 else rows


def furthest(spec: RunSpec, found: Gradients, known: dict[str, Gradients]) -> tuple[float, str]:
    """(relative deviation, name) of the tensor furthest from a single process; `known` keeps what that gives."""
    name = spec.model.name
    if name not in known:
        decoder = fresh(spec)
        observed(decoder, spec, {}, lambda _: batch_of(spec, 0, 2))
        known[name] = gradients(decoder)
    return max((deviation, tensor) for tensor, deviation in differences(found, known[name]).items())


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_every_family_without_masks_of_its_own_goes_round_the_ring() -> None:
    """The others are refused: those with windows below the sequence, soft caps, sinks or ALiBi."""
    specs = specs_of({"cp": 2, "mbs": 2}, moe=False)
    first, second = run_forked(2, outcomes, specs, timeout_s=300)
    refused: set[str] = set()
    known: dict[str, Gradients] = {}
    for spec, one, other in zip(specs, first, second, strict=True):
        if one is None or other is None:
            refused.add(spec.model.name)
            continue
        assert furthest(spec, one[0], known) < (1e-5,), spec.model.name
        assert one[1] == other[1] == predicted(spec, "cp"), spec.model.name
    masked = {
        spec.model.name
        for spec in specs
        for block in spec.model.blocks
        if block.attention and (block.attention.scores or (block.attention.window or SEQ) < SEQ)
    }
    assert refused == masked


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_every_family_with_experts_exchanges_tokens() -> None:
    """Stacked matrices and separate ones, with and without biases, weights on what goes in or comes out."""
    specs = specs_of({"ep": 2, "dp_shard": 2}, moe=True)
    first, second = run_forked(2, outcomes, specs, timeout_s=300)
    known: dict[str, Gradients] = {}
    for spec, one, other in zip(specs, first, second, strict=True):
        assert one is not None
        assert other is not None
        assert furthest(spec, joined([one[0], other[0]]), known) < (1e-5,), spec.model.name
        tokens, counts = predicted(spec, "ep")
        assert one[1][1] == other[1][1] == counts, spec.model.name
        assert one[1][0].count == other[1][0].count == tokens.count
        assert one[1][0].in_bytes + other[1][0].in_bytes == 2 * tokens.in_bytes
