"""What the caching allocator keeps reserved for one plan: the run of a stage as requests (run.py, engines), replayed.

From weights to a steady state: optimizers make their moments in the first step, so the second is the first that holds
all of them, beside blocks that the first one left free.
"""

from __future__ import annotations

import numpy as np

from trainledger.account.memory.active import received_bytes
from trainledger.account.memory.engines import passing_of
from trainledger.account.memory.engines.flat_groups import FlatGroups
from trainledger.account.memory.engines.fsdp1 import Fsdp1
from trainledger.account.memory.engines.fsdp2 import Fsdp2
from trainledger.account.memory.engines.knobs import Knobs
from trainledger.account.memory.engines.nanotron import WaitingGradients
from trainledger.account.memory.engines.one_graph import OneGraph
from trainledger.account.memory.engines.passing import Passing
from trainledger.account.memory.layers import inputs_stay, offloads
from trainledger.account.memory.reserved.allocator import Event, Reserved, replay
from trainledger.account.memory.reserved.engines.flat_groups import FlatRun
from trainledger.account.memory.reserved.engines.fsdp1 import Fsdp1Run, flat_units_of
from trainledger.account.memory.reserved.engines.fsdp2 import Fsdp2Run
from trainledger.account.memory.reserved.engines.fsdp2_units import asked_for, units_of
from trainledger.account.memory.reserved.engines.knobs import KnobsRun
from trainledger.account.memory.reserved.engines.nanotron import WaitingRun
from trainledger.account.memory.reserved.engines.one_graph import OneGraphRun
from trainledger.account.memory.reserved.engines.placed import Placed
from trainledger.account.memory.reserved.offload import OffloadRun
from trainledger.account.memory.reserved.run import Engine, Layer, Requests, Run, Stage, States
from trainledger.account.memory.reserved.script import Script, script_of
from trainledger.account.memory.reserved.standing import passes, standings
from trainledger.account.memory.stage import stage_memory
from trainledger.account.shares import Shares, shares
from trainledger.arrays import IntArray, ceil_div
from trainledger.inventory.blocks import parts_of
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Plans
from trainledger.plans.split import chunks_of, compute_costs, layers_of, layers_per_chunk
from trainledger.schedules import Op, find_schedule

STEPS = 3
"""Steps after which no further one reserves more; two where segments expand, for those leave fewer holes."""


CLOSE = 0.97
"""Of stages that have at least this part of the most allocated, any may have most reserved."""


def reserved_of(
    inventory: Inventory,
    plans: Plans,
    *,
    expandable: bool,
    limit_bytes: int | None = None,
    enough_bytes: int | None = None,
) -> Reserved:
    """The most that is reserved on any stage of a single plan, of those that have nearly the most allocated.

    A request that a stage's limit refuses is reported before anything else; `enough_bytes` as in a replay.
    """
    stages = stage_memory(inventory, plans)
    highest = np.max([stages.total(index)[0] for index in range(len(stages.places))], axis=0)
    rows = [int(row) for row in np.flatnonzero(highest >= CLOSE * highest.max())]
    steps = STEPS - expandable
    runs = [events_of(inventory, plans, row, steps=steps) for row in rows]
    most = {"limit_bytes": limit_bytes, "enough_bytes": enough_bytes}
    found = [replay(events, expandable=expandable, **most) for events in runs]
    return max(found, key=lambda reserved: (reserved.refused, reserved.max_reserved))


def events_of(inventory: Inventory, plans: Plans, row: int, *, steps: int = STEPS) -> list[Event]:
    """The requests of some steps of one stage of a single plan: a row of its distinct stages."""
    if len(plans) != 1:
        raise AssertionError("a run has one plan")
    own, requests = shares(inventory, plans), Requests()
    stage = _stage(inventory, plans, own, row)
    passing = passing_of(inventory, own)
    left_out = asked_for if _by_unit(passing) else passes
    states = States(requests, standings(inventory, own, row, left_out), stage.layers)
    made = OffloadRun if offloads(inventory.setting) else Run
    run = made(requests, stage, states, _engine(passing, requests, row, stage))
    run.start()
    for _ in range(steps):
        run.step()
    return requests.events


def _by_unit(passing: Passing) -> bool:
    """Whether FSDP2's units ask for weights and gradients."""
    return isinstance(passing, Fsdp2) and not (isinstance(passing, Knobs) and not passing.wraps[0, 0])


def _engine(passing: Passing, requests: Requests, row: int, stage: Stage) -> Engine:
    """Who asks for what passes, in its own order where that is known."""
    match passing:
        case Knobs() if not passing.wraps[0, 0]:
            return Engine(requests)
        case Knobs():
            piped = int(passing.own.plans.pp[0]) > 1
            return KnobsRun(
                requests,
                units_of(passing, row, stage.layers),
                accumulate=bool(passing.adds_up[0, 0]),
                stays=not piped and int(passing.own.plans.zero_stage[0]) in (1, 2),
                piped=piped,
            )
        case Fsdp1():
            flat, no_sync = flat_units_of(passing, stage.layers), bool(passing.adds_up[0, 0])
            stay = inputs_stay(passing.inventory.setting)
            return Fsdp1Run(requests, flat, no_sync=no_sync, asks_early=passing.asks_early, inputs_stay=stay)
        case OneGraph():
            return OneGraphRun(requests, units_of(passing, row, stage.layers))
        case Fsdp2():
            piped = int(passing.own.plans.pp[0]) > 1
            return Fsdp2Run(requests, units_of(passing, row, stage.layers), accumulate=piped)
        case FlatGroups():
            return FlatRun(requests, passing, row)
        case WaitingGradients():
            tied = passing.inventory.setting.model.tied
            return WaitingRun(requests, int(passing.tables[0, row]), tied=tied and int(passing.own.plans.pp[0]) == 1)
        case _:
            return Placed(requests, passing, row, stage.layers)


def _stage(inventory: Inventory, plans: Plans, own: Shares, row: int) -> Stage:
    pp, vpp, pp_stage = int(plans.pp[0]), int(plans.vpp[0]), int(own.pp_stage[0, row])
    parts = _Parts(inventory, plans)
    chunks: dict[int, list[Layer]] = {}
    key = 0
    for chunk in chunks_of(pp_stage, pp, vpp):
        there = parts.of(chunk, pp * vpp, own.counts[0, row])
        chunks[chunk] = [Layer(key=key + i, slots=slots, script=script) for i, (slots, script) in enumerate(there)]
        key += len(there)
    ops = _ops(inventory, plans, own, row)
    split = any(op.kind == "weight" for op in ops)
    return Stage(
        chunks=chunks,
        ops=ops,
        releases=find_schedule(inventory.setting.scenario.schedule).releases if split else "backward",
        received=int(received_bytes(inventory, plans, own.counts)[0, row]),
        beside=(
            inventory.setting.profile.memory.workspace_bytes,
            parts.standing,
            parts.beside * (pp_stage == pp - 1),
        ),
    )


class _Parts:
    """The parts of a model as scripts, each made once."""

    def __init__(self, inventory: Inventory, plans: Plans) -> None:
        self.setting, self.at = inventory.setting, inventory.table.at
        tapes = parts_of(inventory, plans)
        self.every, self.first, self.region = tapes.every, tapes.first, tapes.region
        self.standing, self.beside = int(np.max(tapes.standing)), int(np.max(tapes.beside))
        gradients = self.setting.profile.memory.unit_gradients
        self.blocks, self.between = (
            [script_of(tape, 0, gradients=gradients) for tape in kinds] for kinds in (tapes.blocks, tapes.between)
        )
        self.embedding = script_of(tapes.embedding, 0, gradients=gradients)
        self.final = script_of(tapes.final, 0, gradients=gradients)

    def of(self, chunk: int, chunks: int, counts: IntArray) -> list[tuple[tuple[int, ...], Script]]:
        """(slots, script) of every part of a chunk in the order of the model; a depth more is a block and a loss."""
        setting, at, model = self.setting, self.at, self.setting.model
        kinds = {layer: i for i, block in enumerate(model.blocks) for layer in block.layers}
        layout, split = setting.scenario.pp_layout, setting.profile.split
        per_chunk = layers_per_chunk(model.num_layers, chunks, split, layout, compute_costs(model))
        seen = [0] * len(self.blocks)
        there: list[tuple[tuple[int, ...], Script]] = [((at.embedding,), self.embedding)] if chunk == 0 else []
        chosen = [kinds[layer] for layer in layers_of(chunk, per_chunk)]
        for place in range(0, len(chosen), self.region):
            kind, members = chosen[place], chosen[place : place + self.region]
            seen[kind] += 1
            between = seen[kind] % self.every or 0 < self.first <= place
            slots = tuple(member + 1 for member in members)
            there.append((slots, self.between[kind] if between else self.blocks[kind]))
        if chunk == chunks - 1:
            there.append((tuple(slot for slot in (at.final, at.copy) if counts[slot]), self.final))
            more = [((at.mtp,), self.blocks[-1]), ((), self.final)] if counts[at.mtp] else []
            there += more * int(counts[at.mtp])
        return there


def _ops(inventory: Inventory, plans: Plans, own: Shares, row: int) -> tuple[Op, ...]:
    """A step's work, with no more micro-batches than it takes to have most in flight, and a round on top."""
    schedule = find_schedule(inventory.setting.scenario.schedule)
    pp, vpp, batches = int(plans.pp[0]), int(plans.vpp[0]), int(plans.num_microbatches[0])
    each = max(batches // max(batches // pp, 1), 1)
    most = schedule.in_flight(plans, own.pp_stage) + schedule.inputs_kept(plans, own.pp_stage)
    # a chunk more than one on a stage takes its micro-batches in rounds
    few = (int(ceil_div(most[0, row], each * vpp)) + 1) * each if vpp > 1 else int(most[0, row]) + 2
    return schedule.ops(pp, vpp, min(few, batches), int(own.pp_stage[0, row]))
