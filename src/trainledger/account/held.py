"""The lines of what a rank holds: states, what is alive beside them at its peak, and what the allocator does not know.

The lines that are marked as held at the peak sum to what is allocated there, and what lies beside the allocator.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from trainledger.account.memory import Alive, StageMemory, alive_at, beside
from trainledger.account.memory.answers.kept import kept_words
from trainledger.account.memory.engines import PASSING
from trainledger.account.peak import Peak
from trainledger.account.shares import Shares
from trainledger.account.states import alive_at as states_at
from trainledger.account.states import buffer_bytes, on_host, standing, tensor_bytes
from trainledger.dtypes import NF4_BLOCK, NF4_NESTED_BLOCK, bits
from trainledger.inventory.blocks import SOURCES
from trainledger.inventory.buffers import Buffer
from trainledger.inventory.inventory import Inventory
from trainledger.lines import Line, line_id
from trainledger.plans.plan import Plans
from trainledger.profiles.profile import INSTANTS, Instant

KINDS = {"tensor": "a tensor", "gradient": "a gradient", "weight gradient": "a gradient of weights", "work": "scratch"}
LARGEST = {
    "largest_unit": "the largest block, embedding or output layer",
    "largest_tensor": "the largest tensor that trains",
}


def state_lines(inventory: Inventory, own: Shares, where: int, peak: Peak) -> Iterator[Line]:
    """One line per tensor where an engine keeps tensors apart, else one per buffer; those of 0 B are left out.

    So is what only passes within a step: it is a line of the place where most is held. Where only some gradients are
    there yet, these are one line of that place, and none of the tensors' own lines is of it.
    """
    moves = inventory.setting.offload_moves
    for buffer in inventory.buffers:
        row = buffer.row
        if row.passing or not standing(own, buffer)[1]:
            continue
        host = on_host(buffer, moves)
        alive = states_at(buffer, peak.instant, own.plans)
        late = row.category == "gradients" and peak.to_come_bytes != 0
        when, cites = _alive(own, buffer), (row.cite,) if row.cite else ()
        for what, amount, size in _amounts(own, buffer, where):
            if amount:
                yield Line(
                    id=line_id("held", row.category, what, "host" if host else ""),
                    amount=amount,
                    unit="B",
                    basis=row.basis,
                    formula=f"{size}; alive at {when}",
                    cites=cites,
                    pp_stage=int(own.pp_stage[0, where]),
                    at_peak=not host and not late and alive is not None and bool(np.any(alive)),
                )


def _amounts(own: Shares, buffer: Buffer, where: int) -> Iterator[tuple[str, int, str]]:
    """(what, bytes, how they come about) of each line of a buffer."""
    row, experts = buffer.row, own.table.expert
    elements = own.shapes.numel[0] * own.shapes.copies[0] * own.held[0, where] * buffer.mask * buffer.copies
    if not buffer.per_tensor:
        amount = int(buffer_bytes(own, buffer)[0, where])
        parts = tuple(bool((buffer.mask & which).any()) for which in (~experts, experts))
        yield buffer.what, amount, _size(buffer, int(elements.sum()), amount, _over(own, buffer, parts))
        return
    amounts = tensor_bytes(own, buffer)[0] * own.held[0, where] * (row.copies * buffer.copies)
    suffix = "" if row.what == buffer.what == row.category else f":{buffer.what}"
    over = {expert: _over(own, buffer, (not expert, expert)) for expert in (False, True)}
    columns = zip(own.table.names, amounts.tolist(), elements.tolist(), experts.tolist(), strict=True)
    for name, amount, count, expert in columns:
        yield name + suffix, amount, _size(buffer, count, amount, over[expert])


def _size(buffer: Buffer, elements: int, amount: int, over: str) -> str:
    """The elements before data parallelism divides them, what each takes, and over how many ranks."""
    row = buffer.row
    copies = f"{row.copies} x " if row.copies > 1 else ""
    if row.select in LARGEST:
        least = f", or {row.floor:,} elements" if row.floor else ""
        return f"{copies}{amount // row.copies:,} B, {LARGEST[row.select]}{least} ({buffer.dtype})"
    if row.select in ("bucket", "largest_module"):
        return f"{copies}{buffer.elements:,} elements {_width(buffer)}"
    most = f", {row.cap:,} elements at most" if row.cap else ""
    per = f", one for each {row.per} of them," if row.per > 1 else ""
    return f"{copies}{elements:,} elements{per} {_width(buffer)}{over}, cut {row.cut}{most}"


def _width(buffer: Buffer) -> str:
    """What an element takes."""
    if buffer.layout == "block":
        small = f"; where fewer than {buffer.least:,}, in {buffer.plain}" if buffer.least else ""
        return f"({buffer.dtype}, with an fp32 scale for each {buffer.block}{small})"
    each = f"x {bits(buffer.dtype) / 8:g} B ({buffer.dtype})"
    if buffer.layout == "factored":
        return f"{each} of a row and a column of each matrix"
    if buffer.dtype == "nf4":
        return f"{each}, with a byte for each {NF4_BLOCK} and an fp32 scale for each {NF4_NESTED_BLOCK} of these"
    return each


def _over(own: Shares, buffer: Buffer, parts: tuple[bool, ...]) -> str:
    """Over how many ranks a buffer is divided that has dense tensors, or routed experts, or both."""
    if int(own.plans.zero_stage[0]) < buffer.row.sharded_from:
        return ""
    dense, expert = int(own.dense[0]), int(own.expert[0])
    if parts == (False, True):
        return f" over {expert}"
    return f" over {dense}" + (f", experts over {expert}" if parts == (True, True) and expert != dense else "")


def _alive(own: Shares, buffer: Buffer) -> str:
    row = buffer.row
    return _instants(row.alive, row.accumulates and int(own.plans.num_microbatches[0]) > 1)


@lru_cache(maxsize=32)
def _instants(alive: tuple[Instant, ...], accumulates: bool) -> str:
    return ",".join(i for i in INSTANTS if i in alive or (accumulates and i == "loss"))


def peak_lines(inventory: Inventory, plans: Plans, stages: StageMemory) -> Iterator[Line]:
    """What is alive beside the states at the highest place of a step: activations, what passes, scratch memory."""
    index, row = stages.where()
    late = int(stages.to_come(index)[0, row])
    for alive in alive_at(stages, index, row):
        if late and alive.category == "gradients":
            yield _gradients_there(inventory, stages, alive.amount, late)
        if alive.kind != "states":
            formula, cites = _arithmetic(inventory, plans, stages, alive)
            yield Line(
                id=line_id("held", alive.category, alive.name),
                amount=alive.amount,
                unit="B",
                basis="calibrated" if alive.kind == "workspace" else "modelled",
                formula=formula,
                cites=cites,
                pp_stage=int(stages.pp_stage[0, row]),
                at_peak=True,
            )


def _gradients_there(inventory: Inventory, stages: StageMemory, amount: int, late: int) -> Line:
    """The gradients of weights that are there before all of them are."""
    index, row = stages.where()
    place = stages.places[index]
    less, more = f"{amount + late:,} B less {late:,} B that are to come", f"{amount:,} B of units that are reduced"
    return Line(
        id=line_id("held", "gradients", "those that are there"),
        amount=amount,
        unit="B",
        basis="modelled",
        formula=f"{less if late > 0 else more}; in the {place.label}",
        cites=PASSING[inventory.setting.profile.memory.passing].cites,
        pp_stage=int(stages.pp_stage[0, row]),
        at_peak=True,
    )


def _arithmetic(inventory: Inventory, plans: Plans, stages: StageMemory, alive: Alive) -> tuple[str, tuple[str, ...]]:
    """(how an amount at the highest place comes about, where that was read)."""
    rules = inventory.setting.profile.memory
    index, row = stages.where()
    place, manner = stages.places[index].label, SOURCES.get(rules.blocks, ())
    match alive.kind:
        case "saved":
            return f"{kept_words(inventory, plans, stages, index, row)}; in the {place}", manner
        case "passing":
            passing = PASSING[rules.passing]
            return f"{passing.holds}; in the {place}", passing.cites
        case "workspace":
            return "scratch memory of matrix libraries, allocated once and kept", ("torch-workspace",)
        case "gradient" if not alive.storages:
            return f"gradients of what a layer was given, handed to whatever ran before it; in the {place}", manner
        case _:
            each = f"{alive.storages} x " if alive.storages > 1 else ""
            tokens = int(plans.tokens(inventory.setting.workload.seq)[0])
            size = alive.amount // alive.storages
            token = f", {size // tokens:,} B a token of {tokens:,}" if size % tokens == 0 else ""
            return f"{each}{size:,} B{token}; {KINDS[alive.kind]} that is alive in the {place}", manner


def beside_lines(inventory: Inventory, plans: Plans, pp_stage: int) -> Iterator[Line]:
    """What a process takes of the card outside PyTorch's allocator."""
    for found in beside(inventory, plans):
        yield Line(
            id=line_id("held", "beside", found.what),
            amount=found.amount,
            unit="B",
            basis=found.basis,
            formula=f"{found.formula}; outside PyTorch's allocator",
            cites=(found.cite,),
            pp_stage=pp_stage,
            at_peak=True,
        )
