"""A flag that would change nothing of what is run is refused, with its value and what to turn; others are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from command_line import run
from train_files import config
from trainledger.errors import UsageError
from trainledger.service.no_effect import NONE_OF, UNREAD, check_plan_flags, check_run_flags
from trainledger.service.prove_request import Request as Prove
from trainledger.service.train_request import Request as Train

PLAN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "early_stop": ({"early_stop": True}, {"recompute": "full"}),
    "loss_parallel": ({"loss_parallel": False}, {"tp": 2}),
    "cp_comm": ({"cp_comm": "ring"}, {"cp": 2}),
    "schedule": ({"schedule": "zero-bubble"}, {"pp": 2}),
    "seed": ({"seed": 0, "dry": True}, {"dry": False}),
}
"""By flag: fields of a request that give it for nothing, and what gives it an effect."""

FP8 = {"precision": "fp8-rowwise", "steps": 20}
RUN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "initial_scale": ({"initial_scale": 8.0, "precision": "bf16"}, {"precision": "fp16"}),
    "scale_growth_interval": ({"scale_growth_interval": 8}, {"precision": "fp16"}),
    "minimum_scale": ({"minimum_scale": 8.0, **FP8}, {"precision": "fp16"}),
    "fp8_saturated": ({"fp8_saturated": 0.5}, FP8),
    "fp8_flushed": ({"fp8_flushed": 0.0, **FP8, "steps": 9}, FP8),
    "fp8_action": ({"fp8_action": "stop", **FP8, "fp8_every": 0}, {"fp8_every": 20}),
    "fp8_every": ({"fp8_every": 0, "precision": "fp32"}, FP8),
    "spike_window": ({"spike_window": 5, "spike_factor": 0.0, "steps": 6}, {"spike_factor": 2.0}),
    "spike_factor": ({"spike_factor": 2.0, "steps": 50}, {"steps": 51}),
    "min_learning_rate": ({"min_learning_rate": 0.0, "warmup": 3, "steps": 4}, {"warmup": 2}),
    "eval_every": ({"eval_every": 2, "held_out": 0.0}, {"held_out": 0.5}),
    "eval_sequences": ({"eval_sequences": 2, "held_out": 0.0}, {"held_out": 0.5}),
}


@pytest.mark.parametrize("flag", [*UNREAD, *NONE_OF])
@pytest.mark.parametrize("request_type", [Prove, Train])
def test_what_the_program_never_reads_is_refused(flag: str, request_type: type[Prove | Train]) -> None:
    value: Any = {
        "reserve": "4 GiB",
        "allocator": "default",
        "routing": "balanced",
        "frozen_dtype": "bf16",
        "loss": "eager",
    }.get(flag, 0)
    with pytest.raises(UsageError, match=f"--{flag.replace('_', '-')} is {value}, and would change nothing: "):
        check_plan_flags(request_type(**{flag: value}))


@pytest.mark.parametrize("flag", PLAN)
def test_a_flag_of_a_plan_needs_what_it_is_about(flag: str) -> None:
    given, needed = PLAN[flag]
    with pytest.raises(UsageError, match=rf"^--(no-)?{flag.replace('_', '-')} is .*, and would change nothing: .*; "):
        check_plan_flags(Prove(**given))
    check_plan_flags(Prove(**{**given, **needed}))


@pytest.mark.parametrize("flag", RUN)
def test_a_key_of_a_run_needs_what_it_is_about(flag: str) -> None:
    given, needed = RUN[flag]
    with pytest.raises(UsageError, match=rf"^--{flag.replace('_', '-')} is .*, and would change nothing: .*; "):
        check_run_flags(Train(**given))
    check_run_flags(Train(**{**given, **needed}))


def test_a_rate_that_has_no_steps_to_fall_says_how_many_it_needs() -> None:
    with pytest.raises(UsageError, match=r"--steps 6 with --warmup 20 .*; lower --warmup to 4 or raise --steps to 22,"):
        check_run_flags(Train(min_learning_rate=0.0, warmup=20, steps=6))
    for warmup, steps in ((4, 6), (20, 22)):
        check_run_flags(Train(min_learning_rate=0.0, warmup=warmup, steps=steps))


@pytest.mark.parametrize("verb", ["train", "check"])
def test_a_config_with_such_a_key_is_refused_and_leaves_nothing(tmp_path: Path, verb: str) -> None:
    for plan, key in (({"loss-chunks": 0}, {}), ({}, {"initial-scale": 8.0}), ({}, {"fp8-saturated": 0.5})):
        done = run(verb, config(tmp_path, plan=plan, run=key))
        assert (done.code, done.out) == (2, "")
        assert f"--{next(iter({**plan, **key}))} is" in done.err
        assert not (tmp_path / "run").exists()
