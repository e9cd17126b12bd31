"""Flags that would change nothing of what is run: refused, for whoever gives one believes that it does something.

A flag that says what is so anyway, such as --tp 1, is no such flag. What an engine lacks has rules of its own; here is
what only shows once it is this package's program that runs the plan.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from trainledger.errors import UsageError
from trainledger.runtime.spec import FP8_RECIPES
from trainledger.runtime.train.spec import Fp8Spec, TrainSpec
from trainledger.service.prove_request import DEFAULTS, ProgramRequest
from trainledger.service.prove_request import Request as ProveRequest
from trainledger.service.train_request import Request as TrainRequest

UNREAD = {
    "reserve": "nothing that is run is judged against a card's memory; ask it of `trainledger ledger`",
    "allocator": "ranks take PyTorch's allocator as PYTORCH_CUDA_ALLOC_CONF has it; set that instead",
    "routing": "the model's router sends tokens where it wants; ask it of `trainledger ledger`",
    "loss": "the program computes its loss in its own way; ask it of `trainledger ledger`",
    "frozen_dtype": "every weight is trained, so none is frozen; leave it out",
    "largest_layer": "a model is run by its shapes; leave it out",
}
"""Flags of a plan that the program never reads, whatever they say."""
NONE_OF = {
    "loss_chunks": "a loss has 1 part at least; leave it out, for the program computes its loss whole",
    "reduce_bucket": "a bucket has 1 element at least; leave it out, for PyTorch has none of a fixed size",
}
"""Flags that have a rule for every number but 0, which is the engine's own way."""

SCALING = ("initial_scale", "scale_growth_interval", "minimum_scale")
LIMITS = ("fp8_saturated", "fp8_flushed", "fp8_action")
"""What is asked of casts that were counted."""
LEAST_FALL = 2
"""Steps after the warmup from which on the rate falls: the first of them has the highest."""
SPIKE_WINDOW = next(field.default for field in msgspec.structs.fields(TrainSpec) if field.name == "spike_window")


def check_plan_flags(request: ProgramRequest) -> None:
    """Refuse flags of a plan that the program would run as if they had not been given."""
    _refuse(request, _of_plan(request))


def check_run_flags(request: TrainRequest) -> None:
    """The same of the tables of a CONFIG, the plan of which may be of any sizes."""
    check_plan_flags(request)
    _refuse(request, _of_run(request))
    if request.held_out == 0:
        check_held_out(request)


def check_held_out(request: TrainRequest) -> None:
    """Refuse what is said of evaluations where no token is held out."""
    why = "no token is held out that could be judged by; hold text out, or leave it out"
    _refuse(request, ((name, why) for name in ("eval_every", "eval_sequences") if getattr(request, name)))


def _refuse(request: ProgramRequest, idle: Iterator[tuple[str, str]]) -> None:
    for name, why in idle:
        flag, value = name.replace("_", "-"), getattr(request, name)
        said = f"--{flag} is {value}" if not isinstance(value, bool) else f"--{'' if value else 'no-'}{flag} is given"
        raise UsageError(f"{said}, and would change nothing: {why}")


def _of_plan(request: ProgramRequest) -> Iterator[tuple[str, str]]:
    """(flag, why it changes nothing and what to do) of each that was given."""
    yield from ((name, why) for name, why in UNREAD.items() if getattr(request, name) is not None)
    yield from ((name, why) for name, why in NONE_OF.items() if getattr(request, name) == 0)
    if request.early_stop is not None and (request.recompute or DEFAULTS["recompute"]) != "full":
        yield "early_stop", "no block is recomputed; use --recompute full, or leave it out"
    if request.loss_parallel is not None and (request.tp or 1) == 1:
        yield "loss_parallel", "tp=1 cuts no vocabulary; raise --tp, or leave it out"
    if request.cp_comm is not None and (request.cp or 1) == 1:
        yield "cp_comm", "cp=1 cuts no sequence; raise --cp, or leave it out"
    if request.schedule is not None and request.schedule != "interleaved" and (request.pp or 1) == 1:
        yield "schedule", "pp=1 is no pipeline; raise --pp, or leave it out"
    if isinstance(request, ProveRequest) and request.dry and request.seed is not None:
        yield "seed", "a dry run has no numbers; leave one of them out"


def _of_run(request: TrainRequest) -> Iterator[tuple[str, str]]:
    """The same of the tables [data] and [run]."""
    precision = request.precision or DEFAULTS["precision"]
    if precision != "fp16":
        why = f"a loss is scaled under --precision fp16, and this is {precision}; use that, or leave it out"
        yield from ((name, why) for name in SCALING if getattr(request, name) is not None)
    if precision not in FP8_RECIPES:
        why = f"--precision {precision} casts nothing to FP8; use one of {', '.join(FP8_RECIPES)}, or leave it out"
        yield from ((name, why) for name in (*LIMITS, "fp8_every") if getattr(request, name) is not None)
    if request.steps is not None:
        yield from (
            (name, why) for name, why in _of_counts(request, request.steps) if getattr(request, name) is not None
        )


def _of_counts(request: TrainRequest, steps: int) -> Iterator[tuple[str, str]]:
    """What so few steps, or a count of 0, leave without effect."""
    every = Fp8Spec().every if request.fp8_every is None else request.fp8_every
    if every == 0:
        yield from ((name, "--fp8-every 0 counts no casts; raise it, or leave one of them out") for name in LIMITS)
    elif every > steps:
        why = f"casts are counted every --fp8-every {every} steps and the run has {steps}; lower that"
        yield from ((name, why) for name in LIMITS)
    window = SPIKE_WINDOW if request.spike_window is None else request.spike_window
    if request.spike_factor == 0:
        yield "spike_window", "--spike-factor 0 looks for no spike; leave one of them out"
    elif window >= steps:
        why = f"a spike is told by --spike-window {window} steps before it, and the run has {steps}; lower that"
        yield from ((name, why) for name in ("spike_factor", "spike_window"))
    warmup = request.warmup or 0
    if steps - warmup < LEAST_FALL:
        why = f"of --steps {steps} with --warmup {warmup} none comes after the one at the highest rate"
        knob = f"lower --warmup to {max(steps - LEAST_FALL, 0)} or raise --steps to {warmup + LEAST_FALL}"
        yield "min_learning_rate", f"{why}; {knob}, or leave it out"
