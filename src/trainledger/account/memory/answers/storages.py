"""Every size that a plan asks its allocator for, one storage at a time: what a failed request is looked up in.

Tapes have activations and gradients; the states table has what is kept; units and whole copies are what engines make
of weights on the way. A size that the plan as given would not make is marked: attention scores under a fused
attention, logits in another dtype, a model that is loaded whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from trainledger.account.memory.answers.sized import Widths
from trainledger.account.memory.answers.storages_weights import copies, dummies, units
from trainledger.account.memory.answers.stored import Family, Stored, bytes_in, having, otherwise
from trainledger.account.shares import Shares, shares, tensor_elements
from trainledger.account.states import buffer_bytes, on_host, standing, tensor_bytes
from trainledger.dtypes import bits
from trainledger.inventory.blocks import parts_of
from trainledger.inventory.buffers import Buffer
from trainledger.inventory.inventory import Inventory
from trainledger.inventory.tape import Tape
from trainledger.plans.plan import Plans

WHEN = {"forward": "forward", "again": "backward, computed again,", "backward": "backward"}
KEPT = {
    "weights": "when the model is built",
    "gradients": "backward",
    "optimizer": "first optimizer step, or when the optimizer is built",
    "buffers": "when the engine is built",
}
WITHIN = {"loss": "forward", "backward": "backward", "step": "optimizer step"}


def storages(inventory: Inventory, plans: Plans) -> tuple[Stored, ...]:
    """Of a Plans of length one: those that the plan makes first, then those that it would make otherwise."""
    if len(plans) != 1:
        raise AssertionError("storages are those of one plan")
    own = shares(inventory, plans)
    model = inventory.setting.model
    found: list[Stored] = []
    if model.blocks and not model.states_alone and inventory.setting.profile.activations:
        widths = Widths(inventory, plans)
        found += _tapes(inventory, plans, own, widths)
        found += _unplanned(inventory, own, widths)
    found += _buffers(inventory, own)
    found += units(inventory, own)
    found += dummies(inventory, plans, own)
    found += copies(inventory, own)
    return _merged(found)


def _merged(found: Iterable[Stored]) -> tuple[Stored, ...]:
    """The same storage of several pipeline stages once, without those of no bytes."""
    kept: dict[tuple[object, ...], Stored] = {}
    for one in sorted(found, key=lambda one: not one.in_plan):
        key = (one.name, one.amount, one.phase, one.place)
        before = kept.get(key)
        stages = one.pp_stages if before is None else tuple(sorted({*before.pp_stages, *one.pp_stages}))
        if one.amount:
            kept[key] = msgspec.structs.replace(before or one, pp_stages=stages)
    return tuple(kept.values())


def _tapes(inventory: Inventory, plans: Plans, own: Shares, widths: Widths) -> Iterator[Stored]:
    parts, at = parts_of(inventory, plans), inventory.table.at
    kinds = inventory.layers
    named: list[tuple[str, tuple[int, ...], Tape]] = [("the embedding", (at.embedding,), parts.embedding)]
    for number, ((slot, _), tape) in enumerate(zip(kinds, parts.blocks, strict=True), start=1):
        named.append(("a layer" if len(kinds) == 1 else f"a layer of kind {number}", (slot,), tape))
    named.append(("the output layer and loss", (at.final, at.mtp), parts.final))
    for part, slots, tape in named:
        stages = having(own, slots)
        for index, storage in enumerate(tape.storages):
            amount = int(tape.bytes[index, 0])
            when, operation = tape.instants[max(storage.born, 0)] if tape.instants else ("forward", "")
            said = widths.said(amount)
            family: Family = said.family if said else "activations"
            phase = f"{WHEN[when]} of {part}" + (f": {operation}" if operation != storage.name else "")
            yield Stored(
                name=storage.name,
                family="gradients" if family == "activations" and storage.kind != "tensor" else family,
                amount=amount,
                pp_stages=stages,
                phase=phase,
                formula=said.formula if said else f"{amount} B",
                per_token=said.per_token if said else 0,
            )


def _unplanned(inventory: Inventory, own: Shares, widths: Widths) -> Iterator[Stored]:
    """Logits in each dtype, and the scores of attention that materialises them."""
    at = inventory.table.at
    last, layers = having(own, (at.final, at.mtp)), having(own, (slot for slot, _ in inventory.layers))
    for said, dtype in widths.logits():
        name, phase = f"logits in {dtype}", "forward or backward of the output layer and loss"
        yield otherwise(name, "logits", said.amount, last, phase, said.formula, said.per_token)
    for said, dtype in widths.scores():
        name, phase = f"attention scores in {dtype}", "forward or backward of a layer, with --attention eager"
        yield otherwise(name, "scores", said.amount, layers, phase, said.formula, said.per_token)


def _buffers(inventory: Inventory, own: Shares) -> Iterator[Stored]:
    """What the states table keeps: pooled buffers as one storage, others tensor by tensor."""
    for buffer in inventory.buffers:
        if not standing(own, buffer)[0][0]:
            continue
        row = buffer.row
        place = "host" if on_host(buffer, inventory.setting.offload_moves) else "device"
        family: Family = "bucket" if row.select == "bucket" else row.category
        for name, amount, stages, formula in _sizes(own, buffer):
            yield Stored(
                name=name,
                family=family,
                amount=amount,
                pp_stages=stages,
                phase=KEPT[row.category] if "rest" in row.alive or not row.alive else WITHIN[row.alive[0]],
                formula=formula,
                place=place,
            )


def _sizes(own: Shares, buffer: Buffer) -> Iterator[tuple[str, int, tuple[int, ...], str]]:
    """(name, bytes of one storage, pp_stages, formula) of a buffer."""
    row = buffer.row
    if not buffer.per_tensor:
        totals = buffer_bytes(own, buffer)[0] // max(row.copies * buffer.copies, 1)
        for stage, total in zip(own.pp_stage[0].tolist(), totals.tolist(), strict=True):
            yield buffer.what, total, (stage,), f"{_elements(total, buffer.dtype)}, cut {row.cut}"
        return
    each = tensor_bytes(own, buffer)[0]
    elements, held = (part[0] for part in tensor_elements(own, row.cut, row.sharded_from))
    for index, name in enumerate(own.table.names):
        amount = int(each[index]) // max(int(held[index]), 1)
        stages = having(own, (int(own.table.slots[index]),))
        if not amount or not stages:
            continue
        yield f"{buffer.what} of {name}", amount, stages, f"{_elements(amount, buffer.dtype)}, cut {row.cut}"
        if buffer.layout == "block":
            # the scales of its blocks are a tensor of their own
            codes = bytes_in(int(elements[index]), buffer.dtype)
            yield f"{buffer.what} of {name}, codes", codes, stages, _elements(codes, buffer.dtype)


def _elements(amount: int, dtype: str) -> str:
    """An amount as so many elements of a dtype.

    >>> _elements(4096, "fp32")
    '1024 elements x 4 B'
    """
    width = bits(dtype) // 8
    return f"{amount // width} elements x {width} B" if width and amount % width == 0 else f"{amount} B of {dtype}"
