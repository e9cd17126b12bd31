"""Pipelines of several ranks against one process, and what they send against the ledger."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest

from pipeline_runs import Gradients, Seen, replayed, spec_of, trained_stage, trained_whole, worst
from strategies import plan_of, setting_of
from trainledger.account.rank import rank_lines
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.runtime.launch.fork import run_forked
from trainledger.runtime.observe.observation import Call
from trainledger.runtime.spec import RunSpec

TOLERANCE = 1e-5
"""Of fp32 gradients, relative to the largest element of each."""


class World(NamedTuple):
    """Specs that ranks started once run one after another."""

    ranks: int
    specs: tuple[RunSpec, ...]


def two(schedule: str, vpp: int = 1, batches: int = 4, *, layers: int = 4, tied: bool = True) -> RunSpec:
    return spec_of({"pp": 2, "vpp": vpp, "num_microbatches": batches}, layers=layers, tied=tied, schedule=schedule)


def sharded(schedule: str, zero_stage: int, vpp: int = 1, *, layers: int = 4, recompute: str = "none") -> RunSpec:
    plan = {"pp": 2, "vpp": vpp, "dp_shard": 2, "zero_stage": zero_stage}
    return spec_of(plan, layers=layers, tied=True, schedule=schedule, recompute=recompute)


WORLDS = {
    "two": World(
        2,
        (
            two("1f1b"),
            two("interleaved", 2),
            two("zero-bubble"),
            two("zero-bubble", 2),
        ),
    ),
    "small": World(
        2,
        (
            two("1f1b", batches=2),
            two("interleaved", 2, 2),
            two("zero-bubble", batches=2),
            two("1f1b", layers=5, tied=False),
            two("zero-bubble", 2, layers=5, tied=False),
        ),
    ),
    "four": World(
        4, tuple(spec_of({"pp": 4}, layers=5, tied=True, schedule=s) for s in ("1f1b", "interleaved", "zero-bubble"))
    ),
    "sharded": World(
        4,
        (
            sharded("1f1b", 3, recompute="full"),
            sharded("interleaved", 2, 2),
            sharded("zero-bubble", 3),
            sharded("zero-bubble", 1, 2),
            sharded("interleaved", 0, 2),
        ),
    ),
    "tensor": World(
        4,
        (
            spec_of({"pp": 2, "tp": 2, "sp": 1}, vocab=68, tied=True),
            spec_of({"pp": 2, "vpp": 2, "tp": 2, "sp": 1}, vocab=68, schedule="zero-bubble"),
        ),
    ),
    "context": World(4, (spec_of({"pp": 2, "vpp": 2, "cp": 2, "zero_stage": 1}, tied=True, schedule="zero-bubble"),)),
    "thin": World(4, (sharded("interleaved", 3, 4, layers=8), sharded("zero-bubble", 3, 4, layers=8))),
}


def named(*worlds: str) -> list[object]:
    """Every spec of these worlds as a test parameter."""
    return [
        pytest.param(name, index, id="-".join([name, spec.schedule, *(f"{k}{v}" for k, v in changed(spec).items())]))
        for name in worlds
        for index, spec in enumerate(WORLDS[name].specs)
    ]


def changed(spec: RunSpec) -> dict[str, int]:
    return {name: value for name, value in spec.plan.items() if value not in {0, 1}} | {"layers": spec.model.num_layers}


@cache
def seen(name: str) -> list[list[Seen]]:
    """What every rank of a world saw of each of its specs."""
    world = WORLDS[name]
    return [list(of_spec) for of_spec in zip(*run_forked(world.ranks, trained_stage, world.specs), strict=True)]


def whole(name: str, index: int) -> dict[int, Gradients]:
    """Gradients of one process, which are the same for all plans of a batch."""
    spec = WORLDS[name].specs[index]
    sequences = spec.plan["num_microbatches"] * spec.plan["dp_shard"]
    return _whole(spec.model.num_layers, sequences, spec.model.vocab_size, tied=spec.model.tied)


@cache
def _whole(layers: int, sequences: int, vocab: int, *, tied: bool) -> dict[int, Gradients]:
    return trained_whole(spec_of({"num_microbatches": sequences}, layers=layers, vocab=vocab, tied=tied))


@pytest.mark.parametrize(("name", "index"), named("two", "small", "four", "sharded", "tensor", "context"))
def test_every_gradient_is_that_of_a_single_process(name: str, index: int) -> None:
    """At the first and the tenth step of SGD; a tied embedding has the same gradient on both stages that hold it."""
    assert worst(seen(name)[index], whole(name, index)) < (TOLERANCE,)


@pytest.mark.proof
@pytest.mark.parametrize(("name", "index"), named("thin"))
def test_thin_stages_stay_gathered_too(name: str, index: int) -> None:
    """PyTorch's schedule would reshard the first of four stages and gather it again."""
    check_calls(name, index)
    assert worst(seen(name)[index], whole(name, index)) < (10 * TOLERANCE,)


@pytest.mark.parametrize(("name", "index"), named("two", "small", "four", "sharded", "tensor", "context"))
def test_ranks_send_what_the_ledger_says(name: str, index: int) -> None:
    check_calls(name, index)


def check_calls(name: str, index: int) -> None:
    """Every collective, in the first step and in the second."""
    spec = WORLDS[name].specs[index]
    for rank, of_rank in enumerate(seen(name)[index]):
        expected = predicted(spec, rank)
        for step, calls in of_rank.calls.items():
            found = {(call.op, call.group, call.dtype): (call.count, call.in_bytes, call.out_bytes) for call in calls}
            assert found == expected, (rank, step)


def predicted(spec: RunSpec, rank: int) -> dict[tuple[str, str, str], tuple[int, int, int]]:
    """(count, in_bytes, out_bytes) by (op, group, dtype)."""
    names = ("precision", "schedule", "recompute", "optimizer")
    scenario = {name: getattr(spec, name) for name in names}
    inventory = Inventory(setting_of(spec.model, Workload(seq=spec.seq), engine="pytorch", **scenario))
    found: dict[tuple[str, str, str], tuple[int, int, int]] = {}
    for call in rank_lines(inventory, plan_of(**spec.plan), rank, clips=False).calls:
        key = call.op, call.group, call.dtype
        count, in_bytes, out_bytes = found.get(key, (0, 0, 0))
        found[key] = count + call.count, in_bytes + call.in_bytes, out_bytes + call.out_bytes
    return found


@pytest.mark.parametrize(("name", "index"), named("two", "small"))
def test_only_the_last_stage_has_a_loss_and_it_is_the_mean(name: str, index: int) -> None:
    first, last = seen(name)[index]
    assert set(first.losses) == {None}
    assert all(loss is not None and 3 < loss < 6 for loss in last.losses)


@pytest.mark.parametrize(("name", "index"), named("two", "small", "sharded"))
def test_every_micro_batch_has_a_place_to_be_received_in(name: str, index: int) -> None:
    """For each chunk but the first an input, for each but the last a gradient: kept from the first step on."""
    spec = WORLDS[name].specs[index]
    boundary = spec.plan["mbs"] * spec.seq * spec.model.hidden_size * 4
    messages = spec.plan["num_microbatches"] * (2 * spec.plan["vpp"] - 1)
    for rank in seen(name)[index]:
        assert rank.received_bytes == [boundary] * messages
        assert not any(rank.left)


@cache
def replays() -> list[dict[int, tuple[Call, ...]]]:
    (found,) = run_forked(1, replayed, REPLAYED)
    return found


REPLAYED = tuple(
    (WORLDS[name].specs[index], rank, WORLDS[name].ranks)
    for name, index, rank in (("two", 0, 0), ("two", 3, 1), ("sharded", 1, 3), ("sharded", 2, 0), ("four", 0, 2))
)


@pytest.mark.parametrize("index", range(len(REPLAYED)))
def test_one_rank_replayed_alone_sends_the_same(index: int) -> None:
    spec, rank, ranks = REPLAYED[index]
    (name,) = [name for name, world in WORLDS.items() if world.ranks == ranks and spec in world.specs]
    real = seen(name)[WORLDS[name].specs.index(spec)][rank]
    assert replays()[index] == real.calls


def test_late_weight_gradients_are_added_up_in_the_dtype_of_reductions() -> None:
    """In bf16 zero-bubble gives the gradients of 1f1b to the bit; PyTorch alone would add several up in 16 bits."""
    plan = {"pp": 2, "dp_shard": 1, "num_microbatches": 6, "zero_stage": 1}
    specs = [spec_of(plan, schedule=schedule, precision="bf16") for schedule in ("1f1b", "zero-bubble")]
    for straight, late in run_forked(2, trained_stage, specs):
        for step, gradients in straight.gradients.items():
            differ = {name for name, one in gradients.items() if (one != late.gradients[step][name]).any()}
            assert not differ
