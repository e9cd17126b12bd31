"""`prove` for real: ranks are forked, and what they do is what was predicted, unless a fault was planted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from command_line import ROOT, run
from test_shrink import setting_for
from trainledger.errors import Refused
from trainledger.facts.model_load import load_with_config
from trainledger.facts.presets import preset_names
from trainledger.plans.plan import make_plans
from trainledger.reconcile.verdict import WRONG
from trainledger.rules import REFUSALS, RUNTIME, violations
from trainledger.runtime.model.read import READERS, read_semantics
from trainledger.runtime.observe.observation import Observation
from trainledger.runtime.parallelize import tensor
from trainledger.runtime.progress import Progress
from trainledger.runtime.spec import RunSpec
from trainledger.service import prove
from trainledger.service.prove_launch import How, launch
from trainledger.service.prove_plan import planned
from trainledger.service.shrink import shrink

PROVEN: dict[str, tuple[str, ...]] = {
    "ddp": ("gpt2", "--dp", "2"),
    "zero 3 in bf16": ("qwen3-0.6b", "--dp", "2", "--zero", "3", "--precision", "bf16", "--recompute", "full"),
    "tensor parallel": ("llama-3-8b", "--tp", "2", "--no-loss-parallel", "--clip-norm", "0", "--optimizer", "sgd"),
}


@pytest.mark.parametrize("name", PROVEN)
def test_a_plan_is_proven(name: str) -> None:
    found = run("prove", *PROVEN[name], "--json").json()
    wrong = [line for line in found["lines"] if line["verdict"] in WRONG]
    assert (wrong, found["unexplained"]["items"], found["verdict"]) == ([], [], "proven")
    within = {line["id"] for line in found["lines"] if line["verdict"] == "within"}
    assert within == {"held/activations/saved for backward", "held/peak/allocated"}
    assert len(found["losses"]) == found["steps"]
    assert found["run"]["torch_version"].startswith("2.13")


def test_a_process_of_its_own_proves_and_exits_with_0() -> None:
    """As a user runs it: no test harness around the forks, and nothing on standard error of a pipe."""
    command = [sys.executable, "-m", "trainledger", "prove", "gpt2", "--dp", "2", "--zero", "1"]
    done = subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["verdict"] == "proven"


@pytest.mark.parametrize("fault", ["extra-buffer", "dropped-collective"])
def test_a_planted_fault_turns_the_verdict(fault: str) -> None:
    def spoilt(spec: RunSpec, how: How, progress: Progress | None) -> Sequence[Observation]:
        return launch(msgspec.structs.replace(spec, faults=(fault,)), how, progress)

    found = prove.run(prove.Request(model="gpt2", dp=2, zero=3), runner=spoilt)
    assert (found.verdict, found.exit_code) == ("differs", 4)


def test_a_dry_run_is_compared_too() -> None:
    found = run("prove", "gpt2", "--dp", "8", "--zero", "2", "--dry", "--json").json()
    assert (found["verdict"], found["losses"], found["world_size"], found["ranks"]) == ("proven", [], 8, [0])


def test_what_the_forward_pass_does_not_know_is_refused_before_there_are_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*given: object) -> Sequence[Observation]:
        raise AssertionError(given)

    monkeypatch.setattr(prove, "launch", never)
    done = run("prove", "llama-3-8b", "--set", "hidden_act=mish", "--dp", "2")
    assert (done.code, done.out) == (1, "")
    assert "hidden_act" in done.err


def test_a_run_that_the_machine_cannot_hold_is_refused() -> None:
    done = run("prove", "llama-3.1-405b", "--full-size", "--seq", "64")
    assert (done.code, done.out) == (1, "")
    assert "[runtime-host-memory]" in done.err


@pytest.mark.parametrize("name", [name for name in preset_names() if load_with_config(name)[1].family in READERS])
def test_the_small_config_has_a_forward_pass(name: str) -> None:
    config, model = load_with_config(name)
    plan = {"tp": 2, "sp": 1, "etp": 2}
    small = shrink(config, setting_for(model, plan, 1024, ()), make_plans(plan).row(0))
    rules = read_semantics(small.model, small.config)
    turning = {table.dim for table in rules.rotary.values()}
    assert len(rules.attention) == small.model.num_layers
    assert all(dim % 2 == 0 for dim in turning)


@pytest.mark.parametrize("name", preset_names())
def test_the_rule_knows_which_models_are_not_cut_in_order(name: str) -> None:
    """What `parallelize_tensor` would refuse on every rank, said before there are ranks."""
    config, model = load_with_config(name)
    if model.family not in READERS:
        return
    facts = {one.name: one for block in model.blocks for one in block.tensors}
    decoder = SimpleNamespace(semantics=read_semantics(model, config))
    (rule,) = (rule for rule in RUNTIME if rule.id == "runtime-contiguous-tp")
    at = setting_for(model, {}, 1024, ()), make_plans({"tp": 2})
    if not violations([rule], *at):
        with nullcontext() if not violations(REFUSALS, *at) else suppress(Refused):
            tensor._refuse(cast("Any", decoder), facts, 2)
    else:
        with pytest.raises(Refused, match=rule.id):
            tensor._refuse(cast("Any", decoder), facts, 2)


def test_a_family_without_a_forward_pass_is_refused() -> None:
    with pytest.raises(Refused, match="runtime-ssm"):
        planned(prove.Request(model="nemotron-h-56b"))
