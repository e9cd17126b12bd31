"""How layers fall on stages: each engine's rule on figures of its own, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import get_args

import msgspec
import numpy as np
import pytest

from strategies import dense, plan_of, routed, setting_of
from trainledger.facts.by_hand import model_by_hand
from trainledger.inventory.inventory import Inventory
from trainledger.plans.setting import Setting
from trainledger.plans.split import compute_costs, layers_per_chunk
from trainledger.profiles.profile import Split
from trainledger.rules import REFUSALS, findings, violations
from trainledger.schedules import SCHEDULES, Schedule

NANOTRON = model_by_hand(hidden=2048, layers=24, heads=32, ffn=4096, vocab=50257, tied=True)
"""The model of the bench of July 2024 whose first stage was measured in 14 layouts."""
SPLITS: tuple[str, ...] = get_args(Split)


def under(split: str, layers: int) -> Setting:
    """The paper's account with another split of layers."""
    setting = setting_of(dense(layers=layers), schedule="interleaved")
    return dataclasses.replace(setting, profile=msgspec.structs.replace(setting.profile, split=split))


@pytest.mark.parametrize("split", SPLITS)
def test_every_layer_is_on_one_stage(split: str) -> None:
    for layers in range(1, 40):
        costs = (7,) * layers + (25,)
        for chunks in range(1, layers + 1):
            if split != "divisible" or layers % chunks == 0:
                counts = layers_per_chunk(layers, chunks, split, (), costs)
                assert len(counts) == chunks
                assert sum(counts) == layers
                assert min(counts) >= 0


@pytest.mark.parametrize(("chunks", "first"), [(1, 24), (2, 14), (4, 7), (8, 4), (16, 2)])
def test_nanotron_shares_out_work_and_the_output_layer_is_some(chunks: int, first: int) -> None:
    """ceil((L + V h / (4 h^2 + 3 h f)) / p) on the first stage, or all there are: what it was seen to hold."""
    costs = compute_costs(NANOTRON)
    assert layers_per_chunk(24, chunks, "balanced", (), costs)[0] == first
    assert first == min(24, -(-sum(costs) // (costs[0] * chunks)))


def test_nanotrons_later_stages_make_good_what_the_first_ones_took() -> None:
    costs = compute_costs(NANOTRON)
    assert layers_per_chunk(24, 8, "balanced", (), costs) == (4, 3, 3, 4, 3, 3, 4, 0)
    assert layers_per_chunk(24, 4, "balanced", (), costs) == (7, 7, 6, 4)


def test_work_is_matrices_with_whole_heads_and_the_experts_that_are_visited() -> None:
    assert compute_costs(NANOTRON) == (4 * 2048**2 + 3 * 2048 * 4096,) * 24 + (50257 * 2048,)
    assert compute_costs(dense(kv_heads=4)) == compute_costs(dense(kv_heads=8))
    model = routed(8)
    moe = model.blocks[0].moe
    assert moe is not None
    assert compute_costs(model)[0] == 64 * (4 * 64 + 3 * moe.top_k * moe.intermediate)


@pytest.mark.parametrize(
    ("layers", "chunks", "counts"),
    [
        (70, 12, (5, *[6] * 10, 5)),
        (94, 12, (7, *[8] * 10, 7)),
        (100, 6, (16, *[17] * 4, 16)),
        (106, 12, (8, *[9] * 10, 8)),
        (62, 7, (8, *[9] * 6)),
        (81, 9, (9, 10, 10, 10, 10, 10, 10, 10, 2)),
    ],
)
def test_deepspeed_of_2022_counts_embeddings_as_layers(layers: int, chunks: int, counts: tuple[int, ...]) -> None:
    """Rows 1 to 4: BLOOM's own layouts; all: DeepSpeed's partition_balanced as it was at ac71a1a, March 2022."""
    assert layers_per_chunk(layers, chunks, "filled_ends") == counts


@pytest.mark.parametrize(
    ("layers", "chunks", "counts"),
    [
        (72, 6, (12,) * 6),
        (81, 8, (*[11] * 7, 4)),
        (9, 8, (2, 2, 2, 2, 1, 0, 0, 0)),
        (64, 7, (*[9] * 6, 10)),
        (8, 7, (*[1] * 6, 2)),
    ],
)
def test_deepspeed_of_2022_fills_one_stage_after_the_other(layers: int, chunks: int, counts: tuple[int, ...]) -> None:
    """From the same function, with transformer layers alone; the last two are where its search ends on the number."""
    assert layers_per_chunk(layers, chunks, "filled") == counts


@pytest.mark.parametrize(
    ("layers", "chunks", "counts"),
    [
        (22, 8, (2, *[3] * 6, 2)),
        (30, 8, (3, *[4] * 6, 3)),
        (22, 24, (0, *[1] * 22, 0)),
        (24, 8, (3,) * 8),
        (21, 8, (2, 2, *[3] * 5, 2)),
    ],
)
def test_the_zero_bubble_fork_goes_short_at_the_ends(layers: int, chunks: int, counts: tuple[int, ...]) -> None:
    assert layers_per_chunk(layers, chunks, "padded") == counts


@pytest.mark.parametrize(("layers", "chunks", "counts"), [(126, 16, (7, *[8] * 14, 7)), (32, 3, (10, 11, 11))])
def test_torchtitan_until_april_2025_gave_the_rest_to_the_middle(
    layers: int, chunks: int, counts: tuple[int, ...]
) -> None:
    assert layers_per_chunk(layers, chunks, "middle") == counts


@pytest.mark.parametrize(
    ("split", "layers", "bad", "words"),
    [
        ("filled", 9, {"pp": 8}, ("9 layers", "= 8 stages", "left empty", "--pp-layout")),
        ("filled_ends", 7, {"pp": 8}, ("7 layers", "= 8 stages", "left empty")),
        ("padded", 22, {"pp": 8, "vpp": 2, "num_microbatches": 8}, ("the 3 layers", "vpp=2", "1, 3")),
        ("padded", 2, {"pp": 8}, ("8 stages for 2 layers", "at most 4")),
        ("balanced", 4, {"pp": 5}, ("5 stages for 4 layers", "at most 4")),
        ("middle", 4, {"pp": 5}, ("5 stages for 4 layers", "at most 4")),
    ],
)
def test_a_split_that_the_engine_cannot_run_is_refused(
    split: str, layers: int, bad: dict[str, int], words: tuple[str, ...]
) -> None:
    said = [finding.message for finding in findings(REFUSALS, under(split, layers), plan_of(**bad))]
    assert any(all(word in message for word in words) for message in said), said


def test_splits_are_judged_row_by_row() -> None:
    masks = violations(REFUSALS, under("filled", 9), plan_of(pp=[1, 3, 5, 8], num_microbatches=[1, 3, 5, 8], vpp=1))
    assert masks["layers-divisible-by-pp"].tolist() == [False, False, False, True]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=[schedule.name for schedule in SCHEDULES])
def test_no_stage_that_a_table_leaves_out_holds_more(schedule: Schedule) -> None:
    """Whatever waiting for a gradient of weights keeps of a micro-batch: the fullest stage is in the table."""
    model = dense(layers=10)
    inventory = Inventory(setting_of(model, schedule=schedule.name, pp_layout=(1, 2, 2, 2, 2, 1)))
    table = inventory.stages(6, 1)
    layers = np.array([1, 2, 2, 2, 2, 1])
    for batches in (1, 4, 6, 12, 24):
        plans = plan_of(pp=6, num_microbatches=batches)
        every, kept = np.arange(6)[np.newaxis], table.pp_stage[np.newaxis]
        for share in (0.0, 0.4, 0.8, 1.0, 1.2):
            held = schedule.in_flight(plans, every)[0] + share * schedule.inputs_kept(plans, every)[0]
            rows = schedule.in_flight(plans, kept)[0] + share * schedule.inputs_kept(plans, kept)[0]
            assert max(rows * layers[table.pp_stage]) == max(held * layers)
    assert table.pp_stage.tolist() == ([0, 1, 5] if schedule.front_heavy else list(range(6)))
