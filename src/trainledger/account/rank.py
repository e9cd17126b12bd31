"""Everything that one rank should hold, move and compute in one optimizer step: the predicted side of a proof.

The lines bear the names of the modules, layers spelled out, and have this rank's own bytes; instants are those at which
a run is observed. Saved activations and the peak are modelled, and added by rank_memory.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import msgspec
import numpy as np

from trainledger.account.flop import flop_of
from trainledger.account.own import Cut, Part, RankShares
from trainledger.account.states import alive_at, plan_mask
from trainledger.account.traffic import all_traffic
from trainledger.account.traffic.collectives import Collective, Routed
from trainledger.account.traffic.tensor import WHOLE_TENSORS, partial_tensors
from trainledger.arrays import ints
from trainledger.dtypes import kept_bytes
from trainledger.errors import BadInput
from trainledger.inventory.buffers import Buffer
from trainledger.inventory.inventory import Inventory
from trainledger.lines import Basis, Instant, done_id, line_id
from trainledger.plans import sharding
from trainledger.plans.plan import Plans
from trainledger.plans.ranks import peers_of, world_size

INSTANTS: tuple[Instant, ...] = get_args(Instant)
NORM = "gradient norm"
"""What a collective for clipping is called."""
TENSOR_RATE = ("adamw-8bit", "adamw-fp8")
"""Optimizers that keep the learning rate as a tensor. [torchao 0.18.0: optim/adam.py]"""


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """One predicted line: bytes held, or FLOP done.

    tolerance   by how much of itself a measurement may differ, where it need not be equal; None: by any amount
    """

    amount: int
    basis: Basis = "exact"
    formula: str = ""
    tolerance: float | None = None


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives of one kind in one step, all calls together.

    routed       the side whose bytes depend on where the router sends tokens: what balanced routing makes of it
    peers        the ranks of the group, this one among them
    wire_bytes   what this rank sends under the ring algorithm: modelled
    """

    op: str
    group: str
    dtype: str
    what: str
    peers: tuple[int, ...]
    count: int
    in_bytes: int
    out_bytes: int
    wire_bytes: int
    routed: Routed = ""


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's step.

    held       lines by instant and id; in a pipeline micro-batches overlap, and after the loss is no instant of its own
    flop       by operation: `done/<operation>`
    gathered   parameters of each unit as gathered: `held/gathered/<its first tensor>` to bytes; empty without units
    alive      saved activations and the peak; empty where nobody said what the forward pass does
    saved      what a checkpoint of the whole job takes, of the first rank; empty where none is saved
    """

    rank: int
    pp_stage: int
    held: dict[Instant, dict[str, Amount]]
    calls: tuple[Sent, ...]
    flop: dict[str, Amount]
    gathered: dict[str, int]
    alive: dict[str, Amount] = {}
    saved: dict[str, Amount] = {}

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sends, over all its groups."""
        return sum(sent.wire_bytes for sent in self.calls)


def rank_lines(inventory: Inventory, plans: Plans, rank: int, *, clips: bool = True) -> Prediction:
    """What rank `rank` of a Plans of length one holds, moves and computes, by PyTorch's profile.

    clips   gradients are clipped, which takes the norm of the whole job
    """
    name = inventory.setting.profile.name
    if name != "pytorch":
        raise BadInput(f"the profile {name} does not say what each rank holds: use --engine pytorch")
    of = RankShares(inventory, plans, rank)
    return Prediction(
        rank=rank,
        pp_stage=of.place.pp,
        held={instant: _held(of, instant) for instant in INSTANTS if instant != "loss" or plans.pp[0] == 1},
        calls=tuple(sent for sent in _sent(of) if clips or sent.what != NORM),
        flop=_done(of),
        gathered=_gathered(of),
    )


def _held(of: RankShares, instant: Instant) -> dict[str, Amount]:
    """Lines alive at an instant; those of no bytes are left out."""
    lines: dict[str, Amount] = {}
    padding: dict[str, int] = {}
    for buffer in _standing(of, instant):
        for part in of.parts:
            if not buffer.mask[part.row]:
                continue
            cut = _cut(of, buffer, part)
            held, stored = (_bytes(buffer, elements) for elements in (cut.held, cut.stored))
            padding[buffer.row.category] = padding.get(buffer.row.category, 0) + stored - held
            _add(lines, _identity(buffer, part), Amount(amount=held, formula=_formula(buffer, part, cut)))
    for category, beyond in padding.items():
        _add(lines, line_id("held", "padding", category), Amount(amount=beyond, formula="up to equal storages"))
    for identity, amount in (*_steps(of), *_received(of), *_meshes(of), *_recipe(of, instant)):
        _add(lines, identity, amount)
    return lines


def _add(lines: dict[str, Amount], identity: str, amount: Amount) -> None:
    """One more line, or more of one that is there: the buckets of DDP are told of as one."""
    if amount.amount:
        before = lines[identity].amount if identity in lines else 0
        lines[identity] = msgspec.structs.replace(amount, amount=before + amount.amount)


def _standing(of: RankShares, instant: Instant) -> Iterator[Buffer]:
    """The buffers that the profile knows exactly and that are alive at an instant."""
    plans = of.own.plans
    for buffer in of.inventory.buffers:
        row = buffer.row
        if row.basis != "exact" or row.select.startswith("largest") or not plan_mask(plans, buffer)[0]:
            continue
        alive = alive_at(buffer, instant, plans)
        if alive is not None and bool(np.all(alive)):
            yield buffer


def _cut(of: RankShares, buffer: Buffer, part: Part) -> Cut:
    """What a buffer holds and stores of a tensor.

    FSDP2 stores shards of equal size, and gathers them; moments have the shape of what is held. [fsdp2-sharding]
    """
    row = buffer.row
    if row.dtype == "gathered":
        cut = of.cut(part, sharded=of.plan["zero_stage"] > 0)
        return Cut(held=part.numel, stored=cut.stored * cut.ranks, ranks=1, index=0)
    cut = of.cut(part, sharded=of.plan["zero_stage"] >= row.sharded_from)
    return Cut(held=cut.held, stored=cut.held, ranks=cut.ranks, index=cut.index) if row.category == "optimizer" else cut


def _bytes(buffer: Buffer, elements: int) -> int:
    if buffer.layout == "block":
        return int(buffer.quantised_bytes(ints(elements))[0])
    return int(kept_bytes(ints(elements), buffer.dtype)[0])


def _identity(buffer: Buffer, part: Part) -> str:
    row = buffer.row
    if row.category == "buffers":
        return line_id("held", row.category, buffer.what)
    # a tensor is gathered in one dtype, which the line has no need to say
    what = row.what if row.dtype == "gathered" else buffer.what
    suffix = "" if row.what == buffer.what == row.category else f":{what}"
    return line_id("held", row.category, part.name + suffix)


def _formula(buffer: Buffer, part: Part, cut: Cut) -> str:
    share = f", {cut.held} of them on rank {cut.index} of the {cut.ranks} that share it" if cut.ranks > 1 else ""
    return f"{buffer.dtype}, {part.numel} elements{share}"


def _steps(of: RankShares) -> Iterator[tuple[str, Amount]]:
    """The scalar by which an optimizer counts the steps of each parameter. [torch: optim/adam.py]"""
    setting = of.inventory.setting
    if setting.scenario.optimizer not in setting.profile.counts_steps:
        return
    size = int(kept_bytes(ints(1), "fp32")[0])
    for part in of.parts:
        yield line_id("held", "optimizer", f"{part.name}:step"), Amount(amount=size, formula="fp32, one number")


def _received(of: RankShares) -> Iterator[tuple[str, Amount]]:
    """What boundary tensors are received into: one of its own for every micro-batch, for the whole run; the positions.

    [torch: distributed/pipelining/stage.py]
    """
    plan, setting = of.plan, of.inventory.setting
    last = plan["pp"] * plan["vpp"] - 1
    if not last:
        return
    tokens = int(of.own.plans.tokens(setting.workload.seq)[0]) // int(of.own.plans.sp_ranks[0])
    size = int(kept_bytes(ints(tokens * setting.model.hidden_size), setting.recipe.activation)[0])
    amount = Amount(amount=size, formula=f"{setting.recipe.activation}, {tokens} tokens x {setting.model.hidden_size}")
    length = setting.workload.seq // plan["cp"]
    positions = int(kept_bytes(ints(length), "int64")[0])
    yield line_id("held", "buffers", "positions"), Amount(amount=positions, formula=f"int64, {length} tokens")
    for chunk in of.chunks:
        ends = {"input": chunk > 0, "output gradient": chunk < last}
        for what in (what for what, there in ends.items() if there):
            for batch in range(plan["num_microbatches"]):
                name = f"received {what} of chunk {chunk}, micro-batch {batch}"
                yield line_id("held", "buffers", name), amount


def _meshes(of: RankShares) -> Iterator[tuple[str, Amount]]:
    """The ranks of the job, which a device mesh keeps as a tensor; experts have a mesh of their own."""
    size = int(kept_bytes(ints(world_size(of.plan)), "int32")[0])
    for name in ("device mesh", "device mesh of experts")[: 2 if of.plan["ep"] > 1 else 1]:
        yield line_id("held", "buffers", name), Amount(amount=size, formula="int32, one number a rank")


def _recipe(of: RankShares, instant: Instant) -> Iterator[tuple[str, Amount]]:
    """What a recipe and an optimizer in 8 bits keep beside the states. [torch: amp/grad_scaler.py] [torchao]"""
    setting = of.inventory.setting
    recipe, number = setting.recipe, int(kept_bytes(ints(1), "fp32")[0])
    if recipe.scaled_loss:
        yield (
            line_id("held", "buffers", "loss scale"),
            Amount(amount=2 * number, formula="fp32 and int32, a number each"),
        )
    if recipe.weight_scales:
        matrices = sum(of.gathered_as(part) == "fp8" for part in of.parts)
        # what is gathered has the scales of before the step until it is gathered anew
        times = 2 if instant == "rest" else 1
        amount = Amount(amount=times * number * matrices, formula=f"fp32, a number for each of {matrices} weights")
        yield line_id("held", "buffers", "scales of weights"), amount
    if setting.scenario.optimizer in TENSOR_RATE:
        groups = 2 if of.plan["ep"] > 1 else 1
        formula = "fp32, a number for each mesh of parameters"
        yield line_id("held", "buffers", "learning rate"), Amount(amount=groups * number, formula=formula)


def _sent(of: RankShares) -> Iterator[Sent]:
    """The collectives that this rank issues."""
    for call in all_traffic(of.inventory, of.own):
        count = int(call.count[0, 0])
        if count:
            held = _summed_as_held(of, call)
            yield Sent(
                op=call.op,
                group=call.group,
                dtype=call.dtype,
                what=call.what,
                peers=peers_of(of.plan, call.group, of.place.rank),
                count=count,
                in_bytes=int(call.in_bytes[0, 0]) if held is None else held,
                out_bytes=int(call.out_bytes[0, 0]) if held is None else held,
                wire_bytes=round(call.wire_bytes()[0, 0]),
                routed=call.routed,
            )


def _summed_as_held(of: RankShares, call: Collective) -> int | None:
    """Bytes of gradients that are summed as a rank holds them, not as they are stored; None: the call is another.

    Those of an embedding at both ends of a pipeline, and of what every tp rank holds whole.
    """
    if call.group == "embedding":
        rows = of.table.shared
    elif call.what == WHOLE_TENSORS:
        inside, outside = partial_tensors(of.table, of.inventory.setting.model.layer_prefix)
        rows = inside | outside if of.plan["sp"] else inside
    else:
        return None
    held = (of.cut(part, sharded=of.plan["zero_stage"] > 0).held for part in of.parts if rows[part.row])
    return int(kept_bytes(ints(sum(held)), call.dtype)[0])


def _done(of: RankShares) -> dict[str, Amount]:
    """FLOP by operation; what a rank's experts get under expert parallelism is for the router to say."""
    found = {name: int(array[0, 0]) for name, array in flop_of(of.inventory, of.own).items()}
    routed = of.plan["ep"] > 1
    return {
        done_id(name): Amount(amount=amount, basis="modelled" if routed and name == "grouped_matmul" else "exact")
        for name, amount in found.items()
        if amount
    }


def _gathered(of: RankShares) -> dict[str, int]:
    """Bytes of each unit's parameters where FSDP2 has them whole, padded, by the unit's first tensor."""
    setting = of.inventory.setting
    if not setting.casts and not sharding.wrapped(of.own.plans, "unit")[0]:
        return {}
    sizes, names = dict[str, int](), dict[str, str]()
    for part in of.parts:
        cut = of.cut(part, sharded=of.plan["zero_stage"] > 0)
        sizes[part.unit] = sizes.get(part.unit, 0) + int(
            kept_bytes(ints(cut.stored * cut.ranks), of.gathered_as(part))[0]
        )
        # FSDP2 lists what modules hold before what the modules around them hold, such as the sinks of gpt-oss
        if part.unit not in names or (part.name.endswith(".weight") and not names[part.unit].endswith(".weight")):
            names[part.unit] = part.name
    return {line_id("held", "gathered", names[unit]): size for unit, size in sizes.items()}
