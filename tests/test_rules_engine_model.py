"""Rules about what an engine has code for: blocks of one part alone, and the recomputation that it is offered."""

from __future__ import annotations

import pytest

from strategies import convolving, dense, setting_of
from trainledger.errors import Refused
from trainledger.facts.model_load import load_model
from trainledger.plans.plan import make_plans
from trainledger.rules import REFUSALS, require


@pytest.mark.parametrize("pattern", ["*", "-", "M"])
@pytest.mark.parametrize(
    ("engine", "release"), [("nanotron", ""), ("megatron-deepspeed", ""), ("megatron", "zero-bubble")]
)
def test_a_stack_of_single_parts_is_of_no_engine_without_state_spaces(engine: str, release: str, pattern: str) -> None:
    overrides = {"hybrid_override_pattern": pattern, "num_hidden_layers": "1"}
    model = load_model("nemotron-h-56b", overrides=overrides)
    setting = setting_of(model, engine=engine, framework_version=release)
    with pytest.raises(Refused, match=r"^\[engine-model\] nemotron-h-56b has (blocks of attention|state-space)"):
        require(REFUSALS, setting, make_plans({"zero_stage": min(setting.profile.zero_stages)}))


@pytest.mark.parametrize(
    ("engine", "release"), [("nanotron", ""), ("megatron-deepspeed", ""), ("megatron", "zero-bubble")]
)
def test_an_engine_without_state_spaces_has_no_other_mixers_either(engine: str, release: str) -> None:
    setting = setting_of(convolving(), engine=engine, framework_version=release)
    with pytest.raises(Refused, match=r"^\[engine-model\] convolving has short convolutions, which"):
        require(REFUSALS, setting, make_plans({"zero_stage": min(setting.profile.zero_stages)}))


@pytest.mark.parametrize("engine", ["paper", "pytorch", "torchtitan", "megatron"])
def test_an_engine_is_offered_the_recomputation_that_it_has(engine: str) -> None:
    setting = setting_of(dense(), engine=engine, recompute="some")
    with pytest.raises(Refused, match=r"^\[engine-recompute\]") as caught:
        require(REFUSALS, setting, make_plans({"zero_stage": 0}))
    assert ("selective" in str(caught.value)) == bool(setting.profile.memory.recomputes)


@pytest.mark.parametrize("every", ["0", "1", "", "-2", "1000000", "9" * 5000, "\u00b2"])
def test_every_n_is_a_number_of_layers(every: str) -> None:
    scenario = {"engine": "torchtitan", "framework_version": "2025-04"}
    plans = make_plans({"zero_stage": 3, "dp_shard": 2})
    require(REFUSALS, setting_of(dense(), **scenario, recompute="every-999999"), plans)
    with pytest.raises(Refused, match=r"^\[engine-recompute\]"):
        require(REFUSALS, setting_of(dense(), **scenario, recompute=f"every-{every}"), plans)
