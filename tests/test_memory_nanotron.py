"""Peaks of nanotron: fourteen measured ones, most of them to what is printed, and what follows from its tapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import pytest

from trainledger.account.memory import StageMemory, stage_memory
from trainledger.account.shares import shares
from trainledger.account.traffic import all_traffic
from trainledger.errors import Refused
from trainledger.facts.by_hand import model_by_hand
from trainledger.facts.presets import load_preset
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Scenario, make_plans
from trainledger.plans.setting import make_setting
from trainledger.rules import REFUSALS, require

MIB = 2**20
BENCH = model_by_hand(hidden=2048, layers=24, heads=32, ffn=4096, vocab=50257, tied=True)


class Measured(NamedTuple):
    """A run of [nanotron-bench], 4096 tokens a sequence and 1024 sequences a step: max_memory_allocated of rank 0."""

    row: str
    columns: dict[str, int]
    peak_gib: float
    within_mib: float


ROWS = (
    Measured("NTB-004", {"pp": 8, "mbs": 4}, 43.0022, 0.2),
    Measured("NTB-008", {"tp": 2, "sp": 1, "pp": 2, "dp_shard": 2}, 8.36939, 0.2),
    Measured("NTB-009", {"tp": 2, "sp": 1, "dp_shard": 4, "mbs": 8}, 42.6277, 7),
    Measured("NTB-013", {"pp": 16}, 12.3082, 0.2),
    Measured("NTB-014", {"pp": 16, "mbs": 2}, 22.4034, 0.2),
    Measured("NTB-015", {"pp": 8, "dp_shard": 2, "mbs": 2}, 22.2995, 0.2),
    Measured("NTB-016", {"pp": 8, "dp_shard": 2, "mbs": 4}, 41.4894, 0.2),
    Measured("NTB-017", {"tp": 4, "sp": 1, "pp": 4, "mbs": 4}, 12.8021, 2),
    Measured("NTB-018", {"tp": 4, "sp": 1, "pp": 4, "mbs": 8}, 23.8642, 2),
    Measured("NTB-019", {"tp": 4, "sp": 1, "pp": 4, "mbs": 16}, 45.9884, 2),
    Measured("NTB-022", {"dp_shard": 16}, 15.4154, 15),
    Measured("NTB-023", {"dp_shard": 16, "mbs": 2}, 24.4877, 12),
    Measured("NTB-024", {"dp_shard": 16, "mbs": 4}, 41.8949, 12),
    Measured("NTB-027", {"tp": 2, "sp": 1, "dp_shard": 32, "mbs": 8}, 41.2685, 4),
)


def inventory(**words: object) -> Inventory:
    scenario = msgspec.structs.replace(
        Scenario(engine="nanotron", framework_version="2024-07", recompute="none"), **words
    )
    return Inventory(make_setting(BENCH, Workload(seq=4096), scenario))


def peak(columns: Mapping[str, object], **words: object) -> StageMemory:
    return stage_memory(inventory(**words), make_plans({"zero_stage": 1, "num_microbatches": 64, **columns}))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.row)
def test_measured_peaks(row: Measured) -> None:
    assert abs(int(peak(row.columns).allocated[0]) / MIB - row.peak_gib * 1024) < row.within_mib


@pytest.mark.parametrize(
    ("columns", "printed_gib"),
    [({"pp": 8, "mbs": 4}, 4.607), ({"tp": 4, "sp": 1, "pp": 4}, 1.736), ({"tp": 2, "sp": 1, "dp_shard": 4}, 4.752)],
)
def test_between_steps(columns: dict[str, int], printed_gib: float) -> None:
    found = peak(columns)
    rest = next(index for index, place in enumerate(found.places) if place.label == "between steps")
    assert abs(int(found.total(rest)[0, 0]) / 2**30 - printed_gib) < 0.005


def test_one_stage_binds_in_the_loss_and_several_at_the_first_backward() -> None:
    alone, piped = peak({"dp_shard": 16}), peak({"pp": 16})
    assert alone.places[alone.where()[0]].label == "forward of the output layer and loss"
    assert piped.places[piped.where()[0]].label == "backward of the last layer"
    assert piped.where()[1] == 0


def test_gradients_of_a_micro_batch_gather_until_its_end() -> None:
    found, h, f, v = peak({}), 2048, 4096, 50257
    waiting = {p.label: int(x[0, 0]) for p, x in zip(found.places, found.passing, strict=True)}
    layer, table, norm = 2 * (4 * h * h + 3 * h * f + 2 * h), 2 * v * h, 2 * h
    tables = waiting["between steps"]
    assert tables == 24 * 4096 * 64 * (4 + 2)
    assert waiting["backward of the last layer"] == tables + table + norm
    assert waiting["backward of the first layer"] == tables + table + norm + 23 * layer
    assert waiting["gradients handed over after the backward of the embedding"] == tables + table + norm + 24 * layer


def test_a_batch_in_another_order_is_copied_before_the_projection() -> None:
    one, two = (int(peak({"mbs": mbs, "pp": 2, "num_microbatches": 1}).saved[0, 0]) for mbs in (1, 2))
    layers = 14
    assert two - 2 * one == layers * 2 * 4096 * 2 * 2048


def test_recomputing_keeps_the_input_of_each_layer() -> None:
    columns = {"pp": 2, "num_microbatches": 1}
    kept = int(peak(columns, recompute="full").saved[0, 0])
    assert kept == 14 * 4096 * 2 * 2048 + 4096 * 9


def test_a_release_that_gathers_again_keeps_its_part_and_one_buffer() -> None:
    columns = {"tp": 4, "sp": 1, "num_microbatches": 1}
    older, newer = (peak(columns, framework_version=day) for day in ("2024-07", "2024-08-02"))
    x, layers = 4096 * 2 * 2048, 24
    # two matrices of a layer and the output layer keep a quarter of their input; the buffer is a whole one
    assert int(older.saved[0, 0] - newer.saved[0, 0]) == (2 * layers + 1) * x * 3 // 4 - x


def test_traffic_is_one_reduction_and_one_gather() -> None:
    ledger = inventory()
    plans = make_plans({"zero_stage": 1, "dp_shard": 4, "num_microbatches": 8})
    calls = {call.what: call for call in all_traffic(ledger, shares(ledger, plans)) if call.count.any()}
    params = BENCH.total_params
    assert (calls["fp32 gradients"].op, int(calls["fp32 gradients"].count[0, 0])) == ("all_reduce", 1)
    assert int(calls["fp32 gradients"].in_bytes[0, 0]) == 4 * params
    assert calls["updated weights"].op == "all_gather"
    assert int(calls["updated weights"].out_bytes[0, 0]) >= 2 * params


@pytest.mark.parametrize(("name", "word"), [("mixtral-8x7b", "has experts"), ("deepseek-v2", "latent attention")])
def test_a_model_that_it_has_no_code_for_is_refused(name: str, word: str) -> None:
    setting = make_setting(load_preset(name), Workload(), Scenario(engine="nanotron", recompute="none"))
    with pytest.raises(Refused, match=word):
        require(REFUSALS, setting, make_plans({"zero_stage": 1}))
