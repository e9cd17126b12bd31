"""Activations of a stage: what a pipeline receives into, and what of it layers keep anyway."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest

from trainledger.account.memory import stage_memory
from trainledger.account.memory.active import received_bytes
from trainledger.account.rank import rank_lines
from trainledger.facts.presets import load_preset
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Scenario, make_plans
from trainledger.plans.setting import Setting, make_setting


def piped(vpp: int) -> Setting:
    scenario = Scenario(engine="pytorch", precision="bf16", schedule="interleaved" if vpp > 1 else "1f1b")
    return make_setting(load_preset("llama-3-8b"), Workload(seq=512), scenario)


@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_search_counts_the_receive_buffers_that_each_rank_is_predicted_to_hold(vpp: int, tp: int) -> None:
    setting = piped(vpp)
    plans = make_plans({"pp": 4, "vpp": vpp, "tp": tp, "sp": int(tp > 1), "num_microbatches": 8, "zero_stage": 1})
    inventory = Inventory(setting)
    received = received_bytes(inventory, plans, inventory.stage_counts(plans)[0])
    for row, pp_stage in enumerate(inventory.stage_counts(plans)[1][0]):
        held = rank_lines(inventory, plans, int(pp_stage) * tp).held["rest"]
        assert received[0, row] == sum(line.amount for name, line in held.items() if "/received " in name)
    assert received.min() > 0


def test_a_buffer_that_is_received_into_is_what_the_first_layer_keeps_and_what_was_sent_stays_until_its_backward() -> (
    None
):
    setting = piped(1)
    plans = make_plans({"pp": 4, "num_microbatches": 8, "zero_stage": 1})
    inventory = Inventory(setting)
    traffic = msgspec.structs.replace(setting.profile.traffic, keeps_received=False)
    without = dataclasses.replace(setting, profile=msgspec.structs.replace(setting.profile, traffic=traffic))
    more = (stage_memory(inventory, plans).saved - stage_memory(Inventory(without), plans).saved)[0]
    hidden = 512 * 4096 * 2
    # one of 4, 3, 2, 1 micro-batches in flight: the first stage has no input, the last hands nothing on
    stages = inventory.stage_counts(plans)[1][0]
    received = np.where((stages == 0) | (stages == 3), 8, 16) * hidden
    assert (more - received).tolist() == [{0: 4, 3: -1}.get(int(stage), 0) * hidden for stage in stages]
