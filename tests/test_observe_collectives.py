"""Every collective is counted once, at the level of c10d, with what it takes in and gives out on this rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from trainledger.runtime.launch.fork import run_forked
from trainledger.runtime.observe.clock import Clock
from trainledger.runtime.observe.collectives import SIDES, CollectiveCounter, Event
from trainledger.runtime.observe.dispatch import watching
from trainledger.runtime.observe.observation import Call
from trainledger.runtime.observe.observer import Observer

Found = tuple[str, str, int, int]
"""op, dtype, in_bytes, out_bytes."""


def ones(elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(elements, dtype=dtype)


def both_ways(rank: int) -> None:
    to, dtype = 1 - rank, torch.bfloat16
    sent = [dist.P2POp(dist.isend, ones(4, dtype), to), dist.P2POp(dist.irecv, ones(4, dtype), to)]
    for work in dist.batch_isend_irecv(sent):
        work.wait()


def split_unevenly(rank: int) -> None:
    """Rank 0 sends 2 and 1 elements and gets 2 and 2; rank 1 sends 2 and 1 and gets 1 and 1."""
    got = 2 - rank
    dist.all_to_all_single(ones(2 * got), ones(3), [got, got], [2, 1])


def from_or_to_root(rank: int) -> None:
    if rank == 0:
        dist.send(ones(4), 1)
    else:
        dist.recv(ones(4), 0)


Case = tuple[Callable[[], object], list[Found], list[Found]]
"""A call, and what it must be counted as on ranks 0 and 1."""


def alike(call: Callable[[], object], *found: Found) -> Case:
    return call, list(found), list(found)


def lists(rank: int) -> list[Case]:
    """What torch.distributed offers; ranks differ where one is the root."""
    pair = [ones(4), ones(4)]
    root = pair if rank == 0 else None
    halves = [ones(2), ones(2)]
    gather, scatter = ("all_gather", "fp32", 16, 32), ("reduce_scatter", "fp32", 32, 16)
    return [
        alike(partial(dist.all_reduce, ones(4)), ("all_reduce", "fp32", 16, 16)),
        alike(partial(dist.all_gather, pair, ones(4)), gather),
        alike(partial(dist.all_gather_single, ones(8), ones(4)), gather),
        alike(partial(dist.reduce_scatter, ones(4), pair), scatter),
        alike(partial(dist.reduce_scatter_single, ones(4), ones(8)), scatter),
        alike(partial(dist.all_to_all, halves, halves), ("all_to_all", "fp32", 16, 16)),
        (partial(split_unevenly, rank), [("all_to_all", "fp32", 12, 16)], [("all_to_all", "fp32", 12, 8)]),
        (partial(dist.broadcast, ones(4), 1), [("broadcast", "fp32", 0, 16)], [("broadcast", "fp32", 16, 0)]),
        (partial(dist.reduce, ones(4), 1), [("reduce", "fp32", 16, 0)], [("reduce", "fp32", 16, 16)]),
        (partial(dist.gather, ones(4), root, 0), [("gather", "fp32", 16, 32)], [("gather", "fp32", 16, 0)]),
        (partial(dist.scatter, ones(4), root, 0), [("scatter", "fp32", 32, 16)], [("scatter", "fp32", 0, 16)]),
        (partial(from_or_to_root, rank), [("send", "fp32", 16, 0)], [("recv", "fp32", 0, 16)]),
        alike(partial(both_ways, rank), ("send", "bf16", 8, 0), ("recv", "bf16", 0, 8)),
        alike(partial(dist.barrier), ("barrier", "", 0, 0)),
        alike(
            partial(dist.all_gather_object, [None, None], b"x"),
            ("all_gather", "int64", 8, 16),
            ("all_gather", "uint8", 16, 32),
        ),
    ]


def functionals(group: dist.ProcessGroup) -> list[Case]:
    """Functional collectives; those with a backward, both ways."""
    leaf = ones(4).requires_grad_()
    gather, scatter = ("all_gather", "fp32", 16, 32), ("reduce_scatter", "fp32", 32, 16)
    exchange = ("all_to_all", "fp32", 16, 16)
    halves = [2, 2]

    def backward(call: Callable[..., torch.Tensor], *given: object) -> None:
        call(leaf, *given, group).sum().backward()

    return [
        alike(partial(functional.all_reduce, ones(4), "sum", group), ("all_reduce", "fp32", 16, 16)),
        alike(
            partial(functional.all_reduce_coalesced, [ones(4), ones(2)], "sum", group), ("all_reduce", "fp32", 24, 24)
        ),
        alike(partial(functional.all_gather_tensor, ones(4), 0, group), gather),
        alike(partial(functional.reduce_scatter_tensor, ones(8), "sum", 0, group), scatter),
        alike(partial(functional.all_to_all_single, ones(4), halves, halves, group), exchange),
        alike(partial(backward, functional.all_to_all_single_autograd, halves, halves), exchange, exchange),
        alike(partial(backward, functional.all_gather_tensor_autograd, 0), gather, scatter),
        alike(
            partial(backward, functional.reduce_scatter_tensor_autograd, "sum", 0),
            ("reduce_scatter", "fp32", 16, 8),
            ("all_gather", "fp32", 8, 16),
        ),
    ]


def counted(call: Callable[[], object]) -> list[Found]:
    counter = CollectiveCounter({}, Clock())
    with watching(counter):
        call()
    return [(event.op, event.dtype, event.in_bytes, event.out_bytes) for event in counter.events]


def each_collective(rank: int) -> list[tuple[list[Found], list[Found]]]:
    """Counted and expected."""
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    return [(counted(call), (first, second)[rank]) for call, first, second in lists(rank) + functionals(group)]


def test_each_collective_is_counted_once_with_its_sides_on_every_rank() -> None:
    for found in run_forked(2, each_collective):
        assert len(found) == 23
        assert [counts for counts, _ in found] == [expected for _, expected in found]


def test_the_sides_of_all_ops_name_arguments_that_their_schemas_have() -> None:
    given = {"input", "inputs", "tensor", "tensors", "input_tensor", "input_tensors", "input_list"}
    for namespace, sides in SIDES.items():
        for name in sides:
            arguments = {one.name for one in getattr(getattr(torch.ops, namespace), name).default._schema.arguments}
            assert arguments & given, name
            assert arguments & {"process_group", "group_name"}, name


def test_an_unknown_collective_is_refused_rather_than_left_out() -> None:
    counter = CollectiveCounter({}, Clock())
    with pytest.raises(AssertionError, match="_c10d_functional::batch_p2p_ops is no collective"):
        counter.after(torch.ops._c10d_functional.batch_p2p_ops.default)
    assert counter.after(torch.ops._c10d_functional.wait_tensor.default) is None
    assert counter.after(torch.ops.aten.mm.default) is None


def data_parallel(_rank: int) -> tuple[tuple[Call, ...], ...]:
    """DDP; FSDP2 in bf16; FSDP2 with one unit gathered once more: the calls of a step under the ledger's names."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    replicas = DistributedDataParallel(nn.Linear(64, 32, bias=False), init_sync=False)
    step_of(replicas)
    found = [calls_of({world.group_name: "dp"}, partial(step_of, replicas))]
    for again in (False, True):
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 32, bias=False))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for unit in model:
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        first = model[0]
        assert isinstance(first, FSDPModule)

        def step(model: nn.Module = model, first: FSDPModule = first, again: bool = again) -> None:
            if again:
                first.unshard()
                first.reshard()
            step_of(model)

        found.append(calls_of({mesh.get_group().group_name: "dp_shard"}, step))
    return tuple(found)


def step_of(model: nn.Module) -> None:
    model(torch.ones(2, 64)).sum().backward()


def calls_of(names: Mapping[str, str], step: Callable[[], None]) -> tuple[Call, ...]:
    observer = Observer(names)
    with observer.watching(), observer.observing():
        step()
    return observer.result(0, "", []).calls


def test_ddp_and_fsdp2_are_seen_and_a_gather_too_many_shows_in_the_count() -> None:
    def call(op: str, group: str, dtype: str, count: int, in_bytes: int, out_bytes: int) -> Call:
        return Call(op=op, group=group, dtype=dtype, ranks=2, count=count, in_bytes=in_bytes, out_bytes=out_bytes)

    small, large = 64 * 32, 64 * 64
    for ddp, sharded, doubled in run_forked(2, data_parallel):
        reduced, *told = ddp
        assert reduced == call("all_reduce", "dp", "fp32", 1, 4 * small, 4 * small)
        # After the first step DDP tells all ranks the order of its buckets.
        assert {(one.op, one.dtype) for one in told} == {("broadcast", "int32")}
        gathered = 2 * (small + large)
        scatter = call("reduce_scatter", "dp_shard", "fp32", 2, 2 * gathered, gathered)
        assert sharded == (call("all_gather", "dp_shard", "bf16", 4, gathered, 2 * gathered), scatter)
        more = call("all_gather", "dp_shard", "bf16", 5, gathered + large, 2 * (gathered + large))
        assert doubled == (more, scatter)


def total(output: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
    return output.sum()


def tensor_and_pipeline(rank: int) -> tuple[list[Event], list[Event], list[Event]]:
    """Tensor and sequence parallelism; DTensors by themselves; two stages under 1F1B with 4 micro-batches."""
    counter = CollectiveCounter({}, Clock())
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False))
    plan: dict[str, ParallelStyle] = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "2": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh, plan)
    with watching(counter):
        model(torch.ones(2, 8, 32)).sum().backward()
    tensor, counter.events = counter.events, []
    with watching(counter):
        DTensor.from_local(torch.ones(4), mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local().sum()
        # What an operation on a DTensor sends by itself, for want of a placement that it can work on.
        DTensor.from_local(torch.ones(6), mesh, [Partial()]).relu().sum()
    gathered, counter.events = counter.events, []
    boundary = torch.ones(2, 16, requires_grad=True)
    stage = PipelineStage(
        nn.Linear(16, 16), rank, 2, torch.device("cpu"), input_args=(boundary,), output_args=(boundary,)
    )
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=total)
    whole = torch.ones(8, 16)
    with watching(counter):
        if rank == 0:
            schedule.step(whole)
        else:
            schedule.step(target=whole)
    return tensor, gathered, counter.events


def test_dtensor_and_pipeline_schedules_are_counted_by_local_tensors() -> None:
    for rank, (tensor, gathered, piped) in enumerate(run_forked(2, tensor_and_pipeline)):
        half, whole = 2 * 8 * 32 * 4, 2 * 16 * 32 * 4
        assert Counter((event.op, event.in_bytes, event.out_bytes) for event in tensor) == {
            ("all_gather", half, whole): 2,
            ("reduce_scatter", whole, half): 2,
        }
        assert [(event.op, event.in_bytes, event.out_bytes) for event in gathered] == [
            ("all_gather", 16, 32),
            ("all_reduce", 24, 24),
        ]
        boundary = 2 * 16 * 4
        sent = Counter((event.op, event.in_bytes, event.out_bytes) for event in piped if event.dtype == "fp32")
        assert sent == {("send", boundary, 0): 4, ("recv", 0, boundary): 4}, rank


def test_unknown_groups_keep_their_name_and_events_tell_the_phase() -> None:
    counter = CollectiveCounter({"a": "tp"}, Clock())
    counter.events = [
        Event("all_reduce", "a", "fp32", 2, 4, 4, "forward"),
        Event("all_reduce", "b", "fp32", 2, 4, 4, "forward"),
        Event("all_reduce", "a", "fp32", 2, 8, 8, "backward"),
        Event("all_reduce", "a", "bf16", 2, 2, 2, "backward"),
    ]
    assert [(call.group, call.dtype, call.count, call.in_bytes) for call in counter.calls()] == [
        ("b", "fp32", 1, 4),
        ("tp", "bf16", 1, 2),
        ("tp", "fp32", 2, 12),
    ]
