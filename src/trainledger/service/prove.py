"""`prove`: the plan is run, and every line that was predicted is compared with what was measured on every rank."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import shlex
import time
from collections.abc import Sequence
from typing import Literal

import msgspec

from trainledger.account.memory.outside.disk import on_disk
from trainledger.account.peak import single_peak
from trainledger.account.rank import Amount, Prediction, rank_lines
from trainledger.account.rank_memory import with_memory
from trainledger.errors import BadInput, UsageError
from trainledger.facts.semantics import Semantics
from trainledger.inventory.inventory import Inventory
from trainledger.plans.limits import between
from trainledger.plans.ranks import place_of, world_size
from trainledger.plans.setting import Setting
from trainledger.profiles import covers
from trainledger.reconcile.proof import proof
from trainledger.reconcile.verdict import Proof, Unexplained, Verdict
from trainledger.runtime.launch.cluster import read_cluster
from trainledger.runtime.observe.observation import Observation
from trainledger.runtime.progress import Progress
from trainledger.service.common import Note, notes
from trainledger.service.ledger import Engine, PlanDegrees, engine_of, plan_degrees
from trainledger.service.process import Process, process_since
from trainledger.service.prove_launch import How, Runner, how_to_run, launch
from trainledger.service.prove_plan import Planned, planned
from trainledger.service.prove_request import Request
from trainledger.service.shrink import Shrunken

__all__ = ["Request", "Response", "run"]

TIMEOUT_S = 600
MOST_TIMEOUT_S = 7 * 24 * 3600
"""A week: whoever waits longer has typed another unit."""


class ProgramProcess(Process, frozen=True, kw_only=True):
    """The same where the training program ran."""

    torch_version: str


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """What was predicted and measured, line by line and rank by rank.

    plan        as it was run; shrunken says what of it was larger in the request
    ranks       those that were run: all of them, or in a dry run one of each that should do the same
    lines       of every rank that was run
    losses      of every step, the mean over the ranks that computed it; of a dry run none
    list_equal  whether the text lists lines that are equal too
    """

    model: str
    profile: Engine
    plan: PlanDegrees
    world_size: int
    ranks: tuple[int, ...]
    dry: bool
    steps: int
    shrunken: Shrunken | None
    assumed: dict[str, str | int]
    notes: tuple[Note, ...]
    list_equal: bool
    lines: tuple[Verdict, ...]
    unexplained: Unexplained
    losses: tuple[float, ...]
    verdict: Literal["proven", "differs"]
    run: ProgramProcess

    @property
    def exit_code(self) -> int:
        """4 where something differs, or is not explained."""
        return 0 if self.verdict == "proven" else 4


def run(request: Request, *, runner: Runner | None = None, progress: Progress | None = None) -> Response:
    """Plan, run and compare; `runner` in place of this package's own runtime."""
    start = time.perf_counter()
    words = cluster_words(request.cluster_args, dry=request.dry or False)
    timeout_s = seconds_of(request.timeout)
    plan = planned(request)
    if plan.spec.checkpoint:
        _check_saves(request, words, world_size(plan.spec.plan))
    rules = check_runtime(plan) if runner is None else None
    predictions = Predictions(plan, rules, forked=words is None)
    ranks = predictions.different() if request.dry else predictions.ranks
    how = how_to_run(ranks, predictions.held_bytes, words, timeout_s, dry=request.dry or False)
    seen = (runner or launch)(plan.spec, how, progress)
    assert tuple(one.rank for one in seen) == how.ranks, "every rank that was to run has been seen, and no other"
    assert len({one.digest for one in seen}) == 1, "all ranks have seen the same run"
    found = proof([(predictions.whole(one.rank, dry=how.dry), one) for one in seen])
    process = program_process(start, seen[0].torch_version)
    return _response(request, plan, how, seen, found, process)


def program_process(start: float, torch_version: str) -> ProgramProcess:
    """Of a run that began at `start` on time.perf_counter, on ranks with this release of torch."""
    return ProgramProcess(**msgspec.structs.asdict(process_since(start)), torch_version=torch_version)


def _response(
    request: Request, plan: Planned, how: How, seen: Sequence[Observation], found: Proof, process: ProgramProcess
) -> Response:
    run = plan.run
    return Response(
        model=run.setting.model.name,
        profile=engine_of(run),
        plan=plan_degrees(run, plan.plans),
        world_size=world_size(plan.spec.plan),
        ranks=tuple(one.rank for one in seen),
        dry=how.dry,
        steps=plan.spec.steps,
        shrunken=plan.shrunken,
        assumed=run.assumed,
        notes=notes(*plan.asked),
        list_equal=request.all or False,
        lines=found.lines,
        unexplained=found.unexplained,
        losses=() if how.dry else _losses(seen),
        verdict=found.verdict,
        run=process,
    )


class Predictions:
    """What every rank of a run should see.

    rules    of the model's forward pass; None: of saved activations and peaks nothing is predicted
    forked   ranks compute on this machine's CPU; else where there are cards they do on those
    """

    def __init__(self, plan: Planned, rules: Semantics | None, *, forked: bool = True) -> None:
        self.plan = plan
        self.forked = forked
        self.rules = rules
        self.inventory = Inventory(_as_told(plan))
        self.ranks = tuple(range(world_size(plan.spec.plan)))

    def of(self, rank: int) -> Prediction:
        """One rank's."""
        return rank_lines(self.inventory, self.plan.plans, rank, clips=self._clips)

    @property
    def _clips(self) -> bool:
        return self.plan.spec.clip_norm > 0

    def whole(self, rank: int, *, dry: bool) -> Prediction:
        """The same with saved activations and the peak."""
        found = self.of(rank)
        if self.plan.spec.checkpoint and rank == 0:
            lines = {one.line.id: Amount(amount=one.amount, formula=one.formula) for one in on_disk(self.inventory)}
            found = msgspec.structs.replace(found, saved=lines)
        if self.rules is None:
            return found
        return with_memory(
            found, self.inventory, self.plan.plans, self.rules, clips=self._clips, dry=dry, emulates=self.forked
        )

    @property
    def held_bytes(self) -> int:
        """What a rank will hold of the plan."""
        return single_peak(self.inventory, self.plan.plans).total_bytes

    def different(self) -> tuple[int, ...]:
        """The first of all ranks that should see the same."""
        first: dict[bytes, int] = {}
        for rank in self.ranks:
            # the last of those that keys go round keeps less of what attention gives
            last = place_of(self.plan.spec.plan, rank).cp == self.plan.spec.plan["cp"] - 1
            first.setdefault(msgspec.json.encode((_figures(self.of(rank)), last)), rank)
        return tuple(first.values())


def _figures(of: Prediction) -> tuple[object, ...]:
    """What of a prediction is not the rank's own name or place."""
    held = {
        instant: {name: line.amount for name, line in lines.items() if line.amount}
        for instant, lines in of.held.items()
    }
    calls = [msgspec.structs.replace(call, peers=()) for call in of.calls]
    return held, calls, {name: line.amount for name, line in of.flop.items()}, of.gathered


def _check_saves(request: Request, words: tuple[str, ...] | None, ranks: int) -> None:
    """Refuse to count a checkpoint where none can be written, or where one machine sees a part of it."""
    if request.dry:
        raise UsageError("--dry has tensors without numbers and --checkpoint writes them; leave one of them out")
    if words is not None and (nodes := read_cluster(words, ranks).nnodes) > 1:
        raise UsageError(
            f"--checkpoint counts files in a temporary folder of one machine, and --cluster-args has {nodes} nodes; "
            "leave one of them out"
        )


def cluster_words(text: str | None, *, dry: bool = False) -> tuple[str, ...] | None:
    """Torchrun's arguments, apart."""
    if text is None:
        return None
    if dry:
        raise UsageError("--dry runs no ranks and --cluster-args says where they run; leave one of them out")
    return _words(text)


def seconds_of(timeout: int | None) -> int:
    """Seconds after which a run is ended."""
    between("timeout", timeout, 1, MOST_TIMEOUT_S)
    return timeout if timeout is not None else TIMEOUT_S


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--cluster-args {text!r} cannot be taken apart: {error}; close the quotes") from None


def check_runtime(plan: Planned) -> Semantics:
    """The rules of the forward pass, or the refusal of what the runtime would refuse on every rank."""
    try:
        release = importlib.metadata.version("torch").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        raise BadInput(
            "the plan is run on PyTorch, and torch is not installed; pip install 'trainledger[train]', or ask "
            "`trainledger ledger`, which predicts the same lines without it"
        ) from None
    profile = plan.run.setting.profile
    if not covers(profile, release):
        raise BadInput(
            f"torch {release} is installed, and what is predicted was read at {profile.framework_version}, for "
            f"releases from {profile.from_version} and before {profile.before_version}; install "
            f"torch=={profile.framework_version}"
        )
    from trainledger.runtime.model.read import read_semantics

    return read_semantics(plan.spec.model, plan.spec.config)


def _as_told(plan: Planned) -> Setting:
    """The setting under what the ranks were told beside the plan, which a profile holds the default of."""
    setting, spec = plan.run.setting, plan.spec
    traffic = msgspec.structs.replace(
        setting.profile.traffic, recompute_reruns_last=not spec.early_stop, gathers_logits=not spec.loss_parallel
    )
    return dataclasses.replace(setting, profile=msgspec.structs.replace(setting.profile, traffic=traffic))


def _losses(seen: Sequence[Observation]) -> tuple[float, ...]:
    each = [one.losses for one in seen if one.losses]
    return tuple(sum(step) / len(step) for step in zip(*each, strict=True))
