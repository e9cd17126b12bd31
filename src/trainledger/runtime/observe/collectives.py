"""Every collective that a rank issues, as PyTorch's c10d layer sees it: what kind, over which ranks, how many bytes.

The layer is the one between a framework and its backend, so the count does not depend on how a backend carries a
collective out: gloo turns a reduce-scatter into an all-reduce, and a profiler of the backend shows that instead.

in_bytes are the tensors that the rank passes in, out_bytes those that it gets written: of an all-gather the shard and
the whole, of an all-reduce the same twice, of a send only in. Where one rank is the root of a broadcast, reduction,
gather or scatter, the others pass in, or get, nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch._ops import OpOverload

from trainledger.runtime.observe.clock import Clock
from trainledger.runtime.observe.dispatch import After
from trainledger.runtime.observe.observation import Call
from trainledger.runtime.observe.tensors import dtype_word, tensor_bytes, tensors_in

Arguments = Mapping[str, Any]
Pick = Callable[[Arguments, object, int], object]
"""Tensors, in lists or not, among an op's arguments and its result; the rank within the group decides for a root."""


class Event(NamedTuple):
    """One collective. `group` is PyTorch's name of the group."""

    op: str
    group: str
    dtype: str
    ranks: int
    in_bytes: int
    out_bytes: int
    phase: str


class Side(NamedTuple):
    """What one op passes in and what it gets written, from its arguments, its result and the rank within the group."""

    op: str
    passed_in: Pick
    written: Pick


def _argument(name: str) -> Pick:
    return lambda given, _out, _rank: given[name]


def _at_root(name: str) -> Pick:
    """The tensors on the root; nothing elsewhere."""
    return lambda given, _out, rank: given[name] if rank == given["root_rank"] else ()


def _off_root(name: str) -> Pick:
    return lambda given, _out, rank: () if rank == given["root_rank"] else given[name]


def _result(_given: Arguments, out: object, _rank: int) -> object:
    return out


def _nothing(_given: Arguments, _out: object, _rank: int) -> object:
    return ()


def _off_source(given: Arguments, out: object, rank: int) -> object:
    """What a functional broadcast returns, except where it came from."""
    return () if rank == given["src"] else out


def _at_source(given: Arguments, _out: object, rank: int) -> object:
    return given["input"] if rank == given["src"] else ()


def _pair(op: str, passed_in: str, written: str) -> Side:
    return Side(op, _argument(passed_in), _argument(written))


def _functional(op: str, passed_in: str = "input") -> Side:
    return Side(op, _argument(passed_in), _result)


_C10D: dict[str, Side] = {
    "allreduce_": _pair("all_reduce", "tensors", "tensors"),
    "allreduce_coalesced_": _pair("all_reduce", "tensors", "tensors"),
    "allgather_": _pair("all_gather", "input_tensors", "output_tensors"),
    "_allgather_base_": _pair("all_gather", "input_tensor", "output_tensor"),
    "allgather_coalesced_": _pair("all_gather", "input_list", "output_lists"),
    "allgather_into_tensor_coalesced_": _pair("all_gather", "inputs", "outputs"),
    "reduce_scatter_": _pair("reduce_scatter", "input_tensors", "output_tensors"),
    "_reduce_scatter_base_": _pair("reduce_scatter", "input_tensor", "output_tensor"),
    "reduce_scatter_tensor_coalesced_": _pair("reduce_scatter", "inputs", "outputs"),
    "alltoall_": _pair("all_to_all", "input_tensors", "output_tensors"),
    "alltoall_base_": _pair("all_to_all", "input", "output"),
    "send": Side("send", _argument("tensors"), _nothing),
    "recv_": Side("recv", _nothing, _argument("tensors")),
    "recv_any_source_": Side("recv", _nothing, _argument("tensors")),
    "broadcast_": Side("broadcast", _at_root("tensors"), _off_root("tensors")),
    "reduce_": Side("reduce", _argument("tensors"), _at_root("tensors")),
    "gather_": _pair("gather", "input_tensors", "output_tensors"),
    "scatter_": _pair("scatter", "input_tensors", "output_tensors"),
    "barrier": Side("barrier", _nothing, _nothing),
}

_FUNCTIONAL: dict[str, Side] = {
    "all_reduce": _functional("all_reduce"),
    "all_reduce_": _functional("all_reduce"),
    "all_reduce_coalesced": _functional("all_reduce", "inputs"),
    "all_reduce_coalesced_": _functional("all_reduce", "inputs"),
    "all_gather_into_tensor": _functional("all_gather"),
    "all_gather_into_tensor_out": _functional("all_gather"),
    "all_gather_into_tensor_coalesced": _functional("all_gather", "inputs"),
    "reduce_scatter_tensor": _functional("reduce_scatter"),
    "reduce_scatter_tensor_out": _functional("reduce_scatter"),
    "reduce_scatter_tensor_coalesced": _functional("reduce_scatter", "inputs"),
    "all_to_all_single": _functional("all_to_all"),
    "broadcast": Side("broadcast", _at_source, _off_source),
    "broadcast_": Side("broadcast", _at_source, _off_source),
    "isend": Side("send", _argument("tensor"), _nothing),
    "irecv": Side("recv", _nothing, _argument("tensor")),
}

_DTENSOR = {"shard_dim_alltoall": _functional("all_to_all")}

SIDES: dict[str, dict[str, Side]] = {
    "c10d": _C10D,
    "_c10d_functional": _FUNCTIONAL,
    "_dtensor": _DTENSOR,
    "symm_mem": {},
}
"""By namespace and name. [torch: csrc/distributed/c10d/Ops.cpp, Functional.cpp; argument names are the schemas']"""

SILENT = frozenset(
    {
        "c10d::check_for_nan",
        "c10d::monitored_barrier_",
        "_c10d_functional::wait_tensor",
        "_c10d_functional::_wrap_tensor_autograd",
        "_dtensor::mesh_get_process_group",
    }
)
"""What sends no tensor: waiting, looking up, and a barrier for debugging that backends make of their own parts."""


class CollectiveCounter:
    """A watcher that keeps every collective it sees.

    names   PyTorch's name of a group to the ledger's, read when the calls are asked for; a group that has no name
            there keeps PyTorch's, so that its calls are not lost
    """

    def __init__(self, names: Mapping[str, str], clock: Clock) -> None:
        self.events: list[Event] = []
        self._names = names
        self._clock = clock

    def after(self, func: OpOverload) -> After | None:
        """Keep the call, if `func` is a collective. One that is not known here is refused, never left out."""
        sides = SIDES.get(func.namespace)
        schema = func._schema  # in public an OpOverload tells no names of arguments
        if sides is None or schema.name in SILENT:
            return None
        side = sides.get(schema.name.partition("::")[2])
        assert side is not None, f"{schema.name} is no collective that observe/collectives.py knows: add its sides"
        arguments = [argument.name for argument in schema.arguments]

        def keep(args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
            self._keep(side, dict(zip(arguments, args, strict=False)) | kwargs, out)

        return keep

    def _keep(self, side: Side, given: dict[str, Any], out: object) -> None:
        group = _group(given["group_name"] if "group_name" in given else given["process_group"])
        rank = group.rank()
        passed_in = list(tensors_in(side.passed_in(given, out, rank)))
        written = list(tensors_in(side.written(given, out, rank)))
        kinds = dict.fromkeys(dtype_word(tensor.dtype) for tensor in passed_in or written)
        event = Event(
            op=side.op,
            group=group.group_name,
            dtype="+".join(kinds),
            ranks=group.size(),
            in_bytes=sum(map(tensor_bytes, passed_in)),
            out_bytes=sum(map(tensor_bytes, written)),
            phase=self._clock.current,
        )
        self.events.append(event)

    def calls(self) -> tuple[Call, ...]:
        """All collectives of one kind, group and dtype together, in the order of their words."""
        sums: dict[tuple[str, str, str, int], tuple[int, int, int]] = {}
        for event in self.events:
            key = event.op, self._names.get(event.group, event.group), event.dtype, event.ranks
            count, in_bytes, out_bytes = sums.get(key, (0, 0, 0))
            sums[key] = count + 1, in_bytes + event.in_bytes, out_bytes + event.out_bytes
        return tuple(
            Call(op=op, group=group, dtype=dtype, ranks=ranks, count=count, in_bytes=in_bytes, out_bytes=out_bytes)
            for (op, group, dtype, ranks), (count, in_bytes, out_bytes) in sorted(sums.items())
        )


def _group(given: object) -> dist.ProcessGroup:
    """The group that an op was given: by name, boxed, or itself."""
    if isinstance(given, str):
        return _resolve_process_group(dist.GroupName(given))
    group = dist.ProcessGroup.unbox(given) if isinstance(given, torch.ScriptObject) else given
    assert isinstance(group, dist.ProcessGroup)
    return group
