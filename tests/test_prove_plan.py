"""What `prove` makes of a request before anything runs: defaults, the spec of the ranks, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from command_line import ROOT
from trainledger.cli.flags import flags
from trainledger.errors import BadInput, Refused, TrainledgerError, UsageError
from trainledger.rules.runtime import OPTIMIZERS, PRECISIONS, RECOMPUTE
from trainledger.runtime.spec import Optimizer, Precision, Recompute, RunSpec
from trainledger.service.prove_plan import Planned, planned
from trainledger.service.prove_request import Request

CUSTOM = {"model": "custom", "hidden": 64, "layers": 2, "heads": 4, "ffn": 96, "vocab": 256}


def plan(**given: Any) -> Planned:  # noqa: ANN401 - the flags of a request
    return planned(Request(**given))


def test_the_words_of_the_rules_are_those_of_the_spec() -> None:
    assert get_args(Precision) == PRECISIONS
    assert get_args(Optimizer) == OPTIMIZERS
    assert get_args(Recompute) == RECOMPUTE


def test_defaults_are_said_and_told() -> None:
    found = plan(model="llama-3-8b")
    spec, default = found.spec, RunSpec(model=found.spec.model, config={}, plan={}, seq=1)
    assert (spec.precision, spec.optimizer, spec.recompute, spec.plan["zero_stage"]) == ("fp32", "adamw", "none", 0)
    assert found.run.assumed == {
        "gpus": 1,
        "optimizer": "adamw",
        "mbs": 1,
        "engine": "pytorch",
        "precision": "fp32",
        "recompute": "none",
        "zero": 0,
        "seq": 4096,
        "gbs": 2,
    }
    for name in ("steps", "seed", "clip_norm", "early_stop", "loss_parallel"):
        assert getattr(spec, name) == getattr(default, name)
    (steps,) = (one.description for one in flags(Request) if one.name == "steps")
    assert f"[{default.steps}]" in steps


def test_what_is_given_is_told() -> None:
    words = {"steps": 5, "seed": 7, "clip_norm": 0.0, "early_stop": False, "loss_parallel": False}
    plans = {"tp": 2, "cp": 2, "precision": "bf16", "optimizer": "sgd", "recompute": "full", "cp_comm": "all_gather"}
    spec = plan(model="llama-3-8b", zero=3, dp=2, **words, **plans).spec
    for name, value in words.items():
        assert getattr(spec, name) == value
    assert (spec.precision, spec.optimizer, spec.recompute, spec.cp_comm) == ("bf16", "sgd", "full", "all_gather")
    assert (spec.plan["tp"], spec.plan["sp"], spec.plan["etp"], spec.plan["cp"], spec.plan["dp_shard"]) == (
        2,
        1,
        2,
        2,
        2,
    )
    assert spec.seq % 8 == 0


def test_the_ranks_are_told_the_small_model_and_its_config() -> None:
    found = plan(model="mixtral-8x7b", ep=2, dp=2)
    assert found.spec.model == found.run.setting.model
    assert found.spec.config["hidden_size"] == found.spec.model.hidden_size == 64
    assert found.spec.seq == found.run.setting.workload.seq == 32
    assert found.shrunken is not None
    assert found.shrunken.factor == 64
    assert found.asked[0].setting.model.hidden_size == 4096


def test_full_size_leaves_everything_as_it_is() -> None:
    found = plan(model="llama-3-8b", full_size=True, seq=128, gbs=8, mbs=4)
    assert found.shrunken is None
    assert found.spec.model.total_params == 8_030_261_248
    assert (found.spec.seq, found.spec.plan["mbs"], found.spec.plan["num_microbatches"]) == (128, 4, 2)


def test_a_model_by_hand_has_a_config_too() -> None:
    found = plan(**CUSTOM, seq=32)
    assert found.shrunken is None
    assert found.spec.config["model_type"] == found.spec.model.family == "llama"


def test_a_table_of_positions_bounds_the_default_sequence() -> None:
    assert plan(model="gpt2").run.assumed["seq"] == 1024
    with pytest.raises(Refused, match="runtime-positions"):
        plan(model="gpt2", seq=2048)


def test_micro_batches_fill_the_pipeline_unless_a_batch_is_given() -> None:
    assert plan(model="llama-3-8b", pp=3).spec.plan["num_microbatches"] == 6
    assert plan(model="llama-3-8b", pp=3, gbs=3).spec.plan["num_microbatches"] == 3
    with pytest.raises(Refused, match="runtime-microbatches"):
        plan(model="llama-3-8b", pp=3, gbs=2)


def test_a_plan_file_is_taken_as_by_the_ledger(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('model = "llama-3-8b"\ngpus = 8\ntp = 2\nzero = 3\ncluster = "dgx-h100"\n', encoding="utf-8")
    found = plan(model=str(file), zero=2)
    assert (found.spec.plan["tp"], found.spec.plan["dp_shard"], found.spec.plan["zero_stage"]) == (2, 4, 2)
    with pytest.raises(Refused, match=r"\[runtime-engine\] --engine torchtitan"):
        plan(model=str(ROOT / "examples/llama-3-70b-64xh100.toml"))


@pytest.mark.parametrize("elsewhere", [{"dry": True}, {"cluster_args": "--nnodes 2"}])
def test_ranks_that_are_not_forked_here_may_be_many(elsewhere: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="runtime-ranks"):
        plan(model="llama-3-8b", dp=128, zero=1)
    assert plan(model="llama-3-8b", dp=128, zero=1, **elsewhere).spec.plan["dp_shard"] == 128


REFUSED = {
    "a dry DDP": (Refused, {"model": "llama-3-8b", "dp": 2, "dry": True}, r"\[dry-ddp\]"),
    "a dry world": (Refused, {"model": "gpt2", "dp": 1 << 20, "zero": 1, "dry": True}, r"\[dry-ranks\]"),
    "dry experts": (Refused, {"model": "mixtral-8x7b", "dry": True}, r"\[dry-experts\]"),
    "q, k and v in one": (Refused, {"model": "phi-3-mini", "tp": 2}, r"\[runtime-contiguous-tp\]"),
    "a count": (BadInput, {"model": "70B"}, "has no shapes|without shapes"),
    "state space": (Refused, {"model": "nemotron-h-56b"}, r"\[runtime-ssm\]"),
    "heads": (Refused, {"model": "llama-3-8b", "tp": 3, "seq": 96}, r"\[heads-divisible-by-tp\]"),
    "vocabulary": (Refused, {"model": "gpt2", "tp": 2}, r"\[runtime-even-tp\].*vocab_size=50258"),
    "window": (Refused, {"model": "mistral-7b-v0.1", "cp": 2, "seq": 8192}, r"\[cp-causal\]"),
    "alibi": (Refused, {"model": "bloom-560m", "cp": 2}, r"\[cp-causal\].*ALiBi"),
    "pure": (Refused, {"model": "llama-3-8b", "precision": "bf16-pure"}, r"\[runtime-precision\]"),
    "fp8": (Refused, {"model": "gpt2", "precision": "fp8-rowwise"}, r"\[runtime-fp8-layers\]"),
    "engine": (Refused, {"model": "llama-3-8b", "engine": "megatron"}, r"\[runtime-engine\]"),
    "adapters": (Refused, {"model": "llama-3-8b", "lora_rank": 8}, r"\[runtime-adapters\]"),
    "no steps": (BadInput, {"model": "llama-3-8b", "steps": 0}, "--steps is 0"),
    "a negative seed": (BadInput, {"model": "llama-3-8b", "seed": -1}, "--seed is -1"),
    "a negative norm": (UsageError, {"model": "llama-3-8b", "clip_norm": -1.0}, "--clip-norm is -1.0"),
    "no such stage": (BadInput, {"model": "llama-3-8b", "zero": 4}, "--zero is 4"),
    "no model": (UsageError, {}, "no model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_is_refused_with_its_reason(name: str) -> None:
    kind, given, said = REFUSED[name]
    with pytest.raises(TrainledgerError, match=said) as caught:
        plan(**given)
    assert type(caught.value) is kind


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys, json; from trainledger.service import prove; from trainledger.service.prove_plan import planned; "
        "planned(prove.Request(model='llama-3-8b', tp=2)); print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "rich"} & set(json.loads(done.stdout))
