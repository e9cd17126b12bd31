"""Runs that did not happen: what every rank of a spec would see if all went as predicted, and ways to spoil it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from trainledger.account.rank import Prediction, rank_lines
from trainledger.account.rank_memory import with_memory
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.lines import Line
from trainledger.plans.plan import Scenario, make_plans
from trainledger.plans.ranks import world_size
from trainledger.plans.setting import make_setting
from trainledger.runtime.model.read import read_semantics
from trainledger.runtime.observe.observation import Call, Group, Held, Observation
from trainledger.runtime.progress import Progress
from trainledger.runtime.spec import RunSpec
from trainledger.service.prove_launch import How

Spoil = Callable[[Observation], Observation]
REPORTED = Line(id="held/peak/allocated", amount=4096, unit="B", basis="exact")


def predicted(spec: RunSpec, *, alive: bool = False) -> list[Prediction]:
    """Every rank's prediction, from what the ranks are told alone; `alive` also predicts what no name has."""
    scenario = Scenario(
        engine="pytorch",
        precision=spec.precision,
        optimizer=spec.optimizer,
        recompute=spec.recompute,
        schedule=spec.schedule,
        cp_comm=spec.cp_comm,
        pp_layout=spec.pp_layout,
    )
    inventory = Inventory(make_setting(spec.model, Workload(seq=spec.seq), scenario))
    plans, clips = make_plans(spec.plan), spec.clip_norm > 0
    found = [rank_lines(inventory, plans, rank, clips=clips) for rank in range(world_size(spec.plan))]
    if not alive:
        return found
    rules = read_semantics(spec.model, spec.config)
    return [with_memory(one, inventory, plans, rules, clips=clips, dry=False) for one in found]


def as_seen(prediction: Prediction, spec: RunSpec) -> Observation:
    """What a rank sees that does what is predicted of it."""
    held = [
        Held(
            instant=instant,
            claimed={name: amount.amount for name, amount in lines.items()},
            unclaimed=(),
            total_bytes=sum(amount.amount for amount in lines.values()),
        )
        for instant, lines in prediction.held.items()
    ]
    calls = [
        Call(
            op=sent.op,
            group=sent.group,
            dtype=sent.dtype,
            ranks=len(sent.peers),
            count=sent.count,
            in_bytes=sent.in_bytes,
            out_bytes=sent.out_bytes,
        )
        for sent in prediction.calls
    ]
    peers = {sent.group: sent.peers for sent in prediction.calls}
    times = {name: sum(sent.count for sent in prediction.calls if sent.group == name) for name in peers}
    return Observation(
        rank=prediction.rank,
        digest=spec.digest,
        held=tuple(held),
        calls=tuple(calls),
        flop={name.removeprefix("done/"): amount.amount for name, amount in prediction.flop.items()},
        phases_s={},
        losses=(2.5, 2.25),
        gathered=prediction.gathered,
        groups=tuple(
            Group(name=name, ranks=ranks, seen=times[name], issued=times[name]) for name, ranks in peers.items()
        ),
        reported=tuple(
            Line(id=name, amount=amount.amount, unit="B", basis="exact") for name, amount in prediction.alive.items()
        )
        or (REPORTED,),
        torch_version="0.0",
    )


class Fake:
    """A runner that predicts instead of running; `spoil` changes what a rank has seen; `alive` as in `predicted`."""

    def __init__(self, spoil: Spoil | None = None, *, alive: bool = False) -> None:
        self.spoil = spoil
        self.alive = alive
        self.spec: RunSpec | None = None
        self.how: How | None = None

    def __call__(self, spec: RunSpec, how: How, progress: Progress | None) -> Sequence[Observation]:
        """What the ranks that were asked for would have seen."""
        self.spec, self.how = spec, how
        if progress is not None:
            progress(1, 1, "predicting")
        predictions = predicted(spec, alive=self.alive)
        seen = [as_seen(prediction, spec) for prediction in predictions if prediction.rank in how.ranks]
        return [self.spoil(one) for one in seen] if self.spoil is not None else seen


def doubled_call(seen: Observation) -> Observation:
    """The first collective is issued twice as often."""
    first, *others = seen.calls
    return msgspec.structs.replace(seen, calls=(msgspec.structs.replace(first, count=2 * first.count), *others))
