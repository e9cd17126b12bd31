"""Which kinds of layers lie before and after which on a pipeline stage."""

import pytest

from strategies import plan_of, setting_of
from trainledger.facts.presets import load_preset
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory


def test_dense_layers_come_before_those_with_experts() -> None:
    inventory = Inventory(setting_of(load_preset("deepseek-v2"), engine="megatron"))
    earlier, later = inventory.stage_order(plan_of())
    # one dense layer, then 59 with experts
    assert earlier[0, 0].tolist() == [[0, 0], [1, 0]]
    assert later[0, 0].tolist() == [[0, 59], [0, 0]]


@pytest.mark.parametrize("vpp", [1, 2])
def test_layers_that_take_turns_lie_on_both_sides(vpp: int) -> None:
    inventory = Inventory(setting_of(load_preset("gpt-oss-20b"), engine="megatron"))
    plans = plan_of(pp=1 if vpp == 1 else 2, vpp=vpp, num_microbatches=2)
    earlier, later = inventory.stage_order(plans)
    # one kind comes first and the other last, so each has one layer of the other outside it
    assert sorted(earlier[0, 0].ravel().tolist()) == [0, 0, 0, 1]
    assert sorted(later[0, 0].ravel().tolist()) == [0, 0, 0, 1]


def test_a_depth_of_multi_token_prediction_comes_last() -> None:
    setting = setting_of(load_preset("deepseek-v3"), Workload(mtp=True), engine="megatron")
    earlier, later = Inventory(setting).stage_order(plan_of())
    assert earlier[0, 0, 2].tolist() == [3, 58, 0]
    assert later[0, 0, :, 2].tolist() == [1, 1, 0]
