"""From a request to a run: defaults, the rules of the plan as it was asked for, sizes that this machine can run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from trainledger.errors import UsageError
from trainledger.facts.model import Model
from trainledger.facts.workload import DEFAULT_SEQ
from trainledger.plans.limits import between
from trainledger.plans.plan import Plans, make_plans
from trainledger.plans.setting import make_setting
from trainledger.rules import REFUSALS, RUNTIME, Rule, findings, require
from trainledger.rules.runtime import DRY, FORKED, STARTED, learned_positions
from trainledger.runtime.spec import RunSpec
from trainledger.service.common import Run, resolve
from trainledger.service.models import find_config
from trainledger.service.no_effect import check_plan_flags
from trainledger.service.plan_file import overlay
from trainledger.service.prove_request import DEFAULTS, ProgramRequest, Request
from trainledger.service.shrink import Shrunken, shrink, shrunken

LEAST_STEPS, MOST_STEPS = 3, 1000
"""DDP settles its buckets in the second step, and optimizers make their state in the first."""
MOST_SEED = 2**31 - 1
"""The step is added to a million times the seed, and generators take 64 bits."""
MOST_NORM = 1e30
"""Norms are computed in fp32, which ends at 3.4e38; a limit above this one limits nothing."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A run that every rule has passed.

    asked      as it was asked for, with its plan
    run        as it will be run
    plans      the plan of `run`
    spec       what every rank is told
    shrunken   how it was made smaller; None where all sizes are those that were asked for
    """

    asked: tuple[Run, Plans]
    run: Run
    plans: Plans
    spec: RunSpec
    shrunken: Shrunken | None


Found = tuple[dict[str, Any], Model]
"""A config and the model that is built from it."""


def planned(request: Request, found: Found | None = None) -> Planned:
    """The run that a request asks for; nothing is started, and torch is not imported.

    found   the model in place of the one that the request names
    """
    request = overlay(request)
    _check(request)
    config, model = found or find_config(request)
    asked = _resolved(request, model)
    plans = asked.plans([request.zero or 0])
    require(_rules(request), asked.setting, plans)
    if request.full_size:
        spec = _spec(request, config, asked, plans)
        return Planned(asked=(asked, plans), run=asked, plans=plans, spec=spec, shrunken=None)
    return _shrunken(request, config, asked, plans)


def _check(request: Request) -> None:
    check_plan_flags(request)
    between("steps", request.steps, LEAST_STEPS, MOST_STEPS)
    check_numbers(request)


def check_numbers(request: ProgramRequest) -> None:
    """Refuse a seed and a norm that no run can be told, whoever asks for one."""
    between("seed", request.seed, 0, MOST_SEED)
    if request.clip_norm is not None and request.clip_norm < 0:
        raise UsageError(f"--clip-norm is {request.clip_norm}: a norm is not negative; 0 leaves gradients alone")
    if request.clip_norm is not None and request.clip_norm > MOST_NORM:
        raise UsageError(
            f"--clip-norm is {request.clip_norm:g}: it is not above {MOST_NORM:g}; 0 leaves gradients alone"
        )


def _resolved(request: Request, model: Model) -> Run:
    """The run under the defaults of this verb, of which those that were used are in `assumed`."""
    given = {name: value for name, value in DEFAULTS.items() if getattr(request, name) is None}
    if request.seq is None:
        given["seq"] = min(DEFAULT_SEQ, learned_positions(model) or DEFAULT_SEQ)
    run = resolve(msgspec.structs.replace(request, model=None, **given), model=model)
    if request.gbs is None:
        run = _with_microbatches(run, 2 * run.columns["pp"])
        given["gbs"] = run.setting.workload.gbs
    return dataclasses.replace(run, assumed={**run.assumed, **given})


def _with_microbatches(run: Run, count: int) -> Run:
    """The run with so many micro-batches: with one, a stage 1 that does not accumulate looks like a stage 2."""
    columns = {**run.columns, "num_microbatches": count}
    gbs = count * columns["mbs"] * columns["dp_replicate"] * columns["dp_shard"]
    workload = msgspec.structs.replace(run.setting.workload, gbs=gbs)
    return dataclasses.replace(run, columns=columns, setting=dataclasses.replace(run.setting, workload=workload))


def _rules(request: Request) -> tuple[Rule, ...]:
    """The engine, what any plan must be, what the program runs in the way that is asked for."""
    started = request.cluster_args is not None
    forked = not request.dry and not started
    idle = (*(() if forked else FORKED), *(() if started else STARTED), *(() if request.dry else DRY))
    engine, *program = (rule for rule in RUNTIME if rule.id not in idle)
    return (engine, *REFUSALS, *program)


def _shrunken(request: Request, config: Mapping[str, Any], asked: Run, plans: Plans) -> Planned:
    """The same plan at sizes that this machine can run."""
    row = plans.row(0)
    small = shrink(config, asked.setting, row)
    row = {**row, "mbs": small.mbs, "num_microbatches": small.num_microbatches}
    gbs = small.mbs * small.num_microbatches * row["dp_replicate"] * row["dp_shard"]
    setting = make_setting(
        small.model,
        msgspec.structs.replace(asked.setting.workload, seq=small.seq, gbs=gbs),
        msgspec.structs.replace(asked.setting.scenario, pp_layout=small.pp_layout),
        accelerator=asked.setting.accelerator,
        cluster=asked.setting.cluster,
    )
    run = dataclasses.replace(
        asked, setting=setting, columns={name: value for name, value in row.items() if name != "zero_stage"}
    )
    now = make_plans(row)
    broken = findings(_rules(request), setting, now)
    refused = [found.message for found in broken if found.severity == "refuse"]
    assert not refused, f"a legal plan was shrunken to one that is not: {refused}"
    return Planned(
        asked=(asked, plans),
        run=run,
        plans=now,
        spec=_spec(request, small.config, run, now),
        shrunken=shrunken(asked.setting, plans.row(0), small),
    )


def _spec(request: Request, config: Mapping[str, Any], run: Run, plans: Plans) -> RunSpec:
    """What every rank is told."""
    setting = run.setting
    scenario = setting.scenario
    chosen = {
        name: getattr(request, name)
        for name in ("steps", "seed", "clip_norm", "early_stop", "loss_parallel", "checkpoint")
        if getattr(request, name) is not None
    }
    words = {
        "precision": scenario.precision,
        "optimizer": scenario.optimizer,
        "recompute": scenario.recompute,
        "schedule": scenario.schedule,
        "cp_comm": setting.cp_comm,
    }
    told: dict[str, Any] = {
        "model": setting.model,
        "config": dict(config),
        "plan": plans.row(0),
        "seq": setting.workload.seq,
        "pp_layout": scenario.pp_layout,
    }
    return RunSpec(**told, **words, **chosen)
