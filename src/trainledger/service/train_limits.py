"""What the numbers and names of a run may be: asked before its text is read, and by `check` too."""

from __future__ import annotations

import msgspec

from trainledger.errors import BadInput, UsageError
from trainledger.plans.limits import between
from trainledger.runtime.data.prepare import check_share
from trainledger.runtime.spec import RunSpec, Scaling
from trainledger.service.no_effect import check_run_flags
from trainledger.service.prove_plan import check_numbers
from trainledger.service.train_request import Request

MOST_STEPS = 10**9
MOST_RATE = 1e6
"""Of a learning rate and a weight decay: their product with any weight of a network is still a number in fp32."""
MOST_SCALE = 2.0**127
"""The largest power of two in fp32, which is what a loss scale is kept in."""


def check_named(request: Request) -> None:
    """Refuse a file or folder without a name: a shell makes one of a variable that is not set."""
    for flag, what in (("out", "folder"), ("tokenizer", "file"), ("tokens", "file"), ("held_out_tokens", "file")):
        if getattr(request, flag) == "":
            raise BadInput(f"--{flag.replace('_', '-')} is empty; name a {what}, or leave it out")
    if "" in (request.text or ()):
        raise BadInput("--text is empty; name a file, or leave it out")


def check_limits(request: Request) -> None:
    """Refuse numbers that no run can be told, that contradict each other or that would change nothing.

    What is not given is not asked.
    """
    between("steps", request.steps, 1, MOST_STEPS)
    for name in ("warmup", "eval_every", "eval_sequences", "checkpoint_every", "fp8_every"):
        between(_flag(name), getattr(request, name), 0, MOST_STEPS)
    for name in ("keep_last", "spike_window", "scale_growth_interval"):
        between(_flag(name), getattr(request, name), 1, MOST_STEPS)
    for name, most in (("learning_rate", MOST_RATE), ("initial_scale", MOST_SCALE), ("minimum_scale", MOST_SCALE)):
        value = getattr(request, name)
        if value is not None and not value > 0:
            raise UsageError(f"--{_flag(name)} is {value}: it must be above 0")
        _at_most(name, value, most)
    limits = {"min_learning_rate": MOST_RATE, "weight_decay": MOST_RATE, "fp8_saturated": 1.0, "fp8_flushed": 1.0}
    for name in (*limits, "spike_factor"):
        value = getattr(request, name)
        if value is not None and value < 0:
            raise UsageError(f"--{_flag(name)} is {value}: it is not negative; 0 is the least")
        _at_most(name, value, limits.get(name, float("inf")))
    if request.spike_factor is not None and 0 < request.spike_factor <= 1:
        raise UsageError(f"--spike-factor is {request.spike_factor}: a spike is above the median; use 2 or more, or 0")
    if request.held_out is not None:
        check_share(request.held_out)
    check_numbers(request)
    _check_pairs(request)
    check_run_flags(request)


def _check_pairs(request: Request) -> None:
    rate = request.learning_rate or _default(RunSpec, "learning_rate")
    least = request.min_learning_rate
    if least is not None and least > rate:
        raise UsageError(
            f"--min-learning-rate is {least:g}, and the rate falls to it from --learning-rate {rate:g}: it is not "
            "above that; lower the one, or raise the other"
        )
    initial = request.initial_scale or _default(Scaling, "initial")
    minimum = request.minimum_scale or _default(Scaling, "minimum")
    if minimum > initial:
        raise UsageError(
            f"--minimum-scale is {minimum:g}, and the scale begins at --initial-scale {initial:g}: it is not above "
            "that; lower the one, or raise the other"
        )


def _default(kind: type[msgspec.Struct], name: str) -> float:
    return next(float(field.default) for field in msgspec.structs.fields(kind) if field.name == name)


def _at_most(name: str, value: float | None, most: float) -> None:
    if value is not None and value > most:
        raise UsageError(f"--{_flag(name)} is {value:g}: it is not above {most:g}; write a smaller number")


def _flag(name: str) -> str:
    return name.replace("_", "-")
