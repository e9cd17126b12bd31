"""What the caching allocator keeps reserved for one plan: the run of a stage as requests (run.py), replayed.

From weights to a steady state: optimizers make their moments in the first step, so the second is the first that holds
all of them, beside blocks that the first one left free.
"""

from __future__ import annotations

from trainledger.account.memory.active import received_bytes
from trainledger.account.memory.allocator import Event, Reserved, replay
from trainledger.account.memory.run import Engine, Layer, Requests, Run, Stage, States
from trainledger.account.memory.script import Script, script_of
from trainledger.account.memory.stage import stage_memory
from trainledger.account.memory.standing import standings
from trainledger.account.shares import Shares, shares
from trainledger.arrays import ceil_div
from trainledger.inventory.blocks import parts_of
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Plans
from trainledger.plans.split import chunks_of, compute_costs, layers_of, layers_per_chunk
from trainledger.schedules import Op, find_schedule

STEPS = 3


def reserved_of(inventory: Inventory, plans: Plans, *, expandable: bool, limit_bytes: int | None = None) -> Reserved:
    """What is reserved on the stage of a single plan that has most allocated."""
    _, row = stage_memory(inventory, plans).where()
    return replay(events_of(inventory, plans, row), expandable=expandable, limit_bytes=limit_bytes)


def events_of(inventory: Inventory, plans: Plans, row: int, *, steps: int = STEPS) -> list[Event]:
    """The requests of some steps of one stage of a single plan: a row of its distinct stages."""
    own = shares(inventory, plans)
    requests = Requests()
    stage = _stage(inventory, plans, own, row)
    states = States(requests, standings(inventory, own, row), stage.layers)
    run = Run(requests, stage, states, Engine(requests))
    run.start(inventory.setting.profile.memory.workspace_bytes)
    for _ in range(steps):
        run.step()
    return requests.events


def _stage(inventory: Inventory, plans: Plans, own: Shares, row: int) -> Stage:
    ops = _ops(inventory, plans, own, row)
    chunks: dict[int, list[Layer]] = {}
    key = 0
    for chunk, parts in _parts(inventory, plans, own, row).items():
        chunks[chunk] = [Layer(key=key + i, slots=slots, script=script) for i, (slots, script) in enumerate(parts)]
        key += len(parts)
    return Stage(
        chunks=chunks,
        ops=ops,
        releases="weight" if any(op.kind == "weight" for op in ops) else "backward",
        received=int(received_bytes(inventory, plans, own.counts)[0, row]),
    )


def _parts(
    inventory: Inventory, plans: Plans, own: Shares, row: int
) -> dict[int, list[tuple[tuple[int, ...], Script]]]:
    """(slots, script) of every part of each chunk, in the order of the model; a depth more is a block and a loss."""
    setting, at = inventory.setting, inventory.table.at
    model, gradients = setting.model, setting.profile.memory.unit_gradients
    tapes = parts_of(inventory, plans)
    blocks = [script_of(tape, 0, gradients=gradients) for tape in tapes.blocks]
    first, final = (script_of(tape, 0, gradients=gradients) for tape in (tapes.embedding, tapes.final))
    kinds = {layer: i for i, block in enumerate(model.blocks) for layer in block.layers}
    pp, vpp = int(plans.pp[0]), int(plans.vpp[0])
    layout = setting.scenario.pp_layout
    per_chunk = layers_per_chunk(model.num_layers, pp * vpp, setting.profile.split, layout, compute_costs(model))
    parts: dict[int, list[tuple[tuple[int, ...], Script]]] = {}
    for chunk in chunks_of(int(own.pp_stage[0, row]), pp, vpp):
        there: list[tuple[tuple[int, ...], Script]] = []
        there += [((kinds[i] + 1,), blocks[kinds[i]]) for i in layers_of(chunk, per_chunk)]
        if chunk == 0:
            there.insert(0, ((at.embedding,), first))
        if chunk == pp * vpp - 1:
            there.append(((at.final, at.copy), final))
            depths = int(own.counts[0, row, at.mtp])
            there += [((at.mtp,), blocks[-1]), ((), final)] * depths
        parts[chunk] = there
    return parts


def _ops(inventory: Inventory, plans: Plans, own: Shares, row: int) -> tuple[Op, ...]:
    """A step's work, with no more micro-batches than it takes to have most in flight, and a round on top."""
    schedule = find_schedule(inventory.setting.scenario.schedule)
    pp, vpp, batches = int(plans.pp[0]), int(plans.vpp[0]), int(plans.num_microbatches[0])
    each = max(batches // max(batches // pp, 1), 1)
    most = schedule.in_flight(plans, own.pp_stage) + schedule.inputs_kept(plans, own.pp_stage)
    few = (int(ceil_div(most[0, row], each * vpp)) + 1) * each
    return schedule.ops(pp, vpp, min(few, batches), int(own.pp_stage[0, row]))
