"""From the words of a run's row to the categories of a plan, and what the accounts have no word for."""

from __future__ import annotations

import pytest

from trainledger.plans.plan import Scenario
from trainledger.scoring.cells import Cells
from trainledger.scoring.prediction import Unsupported
from trainledger.scoring.run_engine import engine_of
from trainledger.scoring.run_layout import layout_of
from trainledger.scoring.run_model import model_of
from trainledger.scoring.run_scenario import scenario_of
from trainledger.scoring.run_told import told
from trainledger.scoring.words import Unclear

ROW = {
    "system": "Megatron-LM",
    "num_gpus": "8",
    "zero_stage": "1",
    "mbs": "1",
    "gbs": "64",
    "model": "llama3-8b",
    "layers": "22",
    "seq_len": "64",
    "precision": "bf16",
    "recompute": "none",
}
TITAN = {**ROW, "system": "torchtitan", "source_date": "2025-06", "zero_stage": "3"}
PIPELINE = {**ROW, "num_gpus": "16", "pp": "2"}


def scenario(row: dict[str, str]) -> tuple[Scenario, list[str]]:
    cells, assumed = Cells(row), list[str]()
    reading = engine_of(cells)
    found = scenario_of(told(cells, reading), reading, layout_of(cells, reading), model_of(cells), assumed)
    return found, assumed


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({}, {"engine": "megatron", "precision": "bf16", "recompute": "none", "grad_dtype": "", "attention": "flash"}),
        ({"precision": "fp8 current scaling"}, {"precision": "fp8-tensorwise"}),
        ({"grad_dtype": "fp32"}, {"grad_dtype": ""}),
        ({"grad_dtype": "16-bit"}, {"grad_dtype": "bf16"}),
        ({"flash_attention": "0"}, {"attention": "eager"}),
        ({"recompute": "selective"}, {"recompute": "selective", "recompute_parts": ()}),
        (
            {"recompute": "selective", "recompute_detail": "layernorm, mlp"},
            {"recompute": "selective", "recompute_parts": ("layernorm", "mlp")},
        ),
        (
            {"recompute": "full", "recompute_detail": "block method, 2 layers per stage"},
            {"recompute": "full", "recompute_layers": 2},
        ),
        ({"loss": "fused (TransformerEngine)"}, {"loss": "fused"}),
        ({"cp_comm": "Ulysses"}, {"cp_comm": "all_to_all"}),
        ({"allocator": "expandable_segments:True"}, {"allocator": "expandable"}),
        ({"compile": "1"}, {"compile": ""}),
        ({"shard_note": "optimizer offload"}, {"offload": ("optimizer",)}),
        ({"param_dtype": "bf16 compute", "optimizer": "adamw (fused)"}, {"optimizer": "adamw"}),
    ],
)
def test_words_become_a_scenario(row: dict[str, str], expected: dict[str, object]) -> None:
    found, _ = scenario({**ROW, **row})
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"compile": "0"}, {"compile": "off", "framework_version": "2025-06-30"}),
        ({"compile": "1"}, {"compile": "on"}),
        ({"recompute": "selective", "recompute_detail": "every 2nd layer"}, {"recompute": "every-2"}),
        ({"recompute": "selective", "recompute_detail": "per-op SAC"}, {"recompute": "selective"}),
        ({"loss": "chunked", "loss_chunks": "4"}, {"loss": "chunked", "loss_chunks": 4}),
        ({"loss": "eager or compiled, unchunked"}, {"loss": "", "loss_chunks": 0}),
        ({"param_dtype": "bf16 (pure bf16)"}, {"precision": "bf16-pure"}),
        ({"grad_dtype": "fp32 reduce"}, {"grad_dtype": ""}),
    ],
)
def test_words_become_a_scenario_of_fsdp2(row: dict[str, str], expected: dict[str, object]) -> None:
    found, _ = scenario({**TITAN, **row})
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("row", "layout", "schedule"),
    [
        ({}, (), "1f1b"),
        ({"pp_schedule": "1F1B", "vpp": "11"}, (), "interleaved"),
        ({"vpp": "11", "pp_layout": "balanced"}, (), "interleaved"),
        ({"pp_layout": "one layer fewer at both ends"}, (11, 11), "1f1b"),
        ({"num_gpus": "32", "pp": "4", "pp_layout": "first and last stage hold one layer fewer"}, (5, 6, 6, 5), "1f1b"),
        ({"pp_layout": "12, 10"}, (12, 10), "1f1b"),
    ],
)
def test_layers_on_stages(row: dict[str, str], layout: tuple[int, ...], schedule: str) -> None:
    found, _ = scenario({**PIPELINE, **row})
    assert (found.pp_layout, found.schedule) == (layout, schedule)


def test_stages_that_cannot_be_equal_count_the_ends() -> None:
    found, assumed = scenario({**PIPELINE, "num_gpus": "32", "pp": "4"})
    assert found.pp_layout == (5, 6, 6, 5)
    assert assumed == ["pp_layout is blank: embedding and output layer count as a layer each"]
    with pytest.raises(Unclear, match="pp_layout is blank, and 23 layers do not divide over 2 stages"):
        scenario({**PIPELINE, "layers": "23"})


def test_parts_that_an_engine_chooses_by_itself_are_listed() -> None:
    _, assumed = scenario({**ROW, "recompute": "selective"})
    assert assumed == ["recompute is selective: core_attn, as megatron does"]


def test_what_the_accounts_do_not_tell_apart_is_listed() -> None:
    row = {"overlap_flags": "async TP; fp8 all-gather", "precision": "mxfp8 (experts)", "moe_routing": "natural"}
    _, assumed = scenario({**TITAN, **row})
    assert [text.split(":")[0] for text in assumed] == [
        "overlap_flags",
        "overlap_flags",
        "precision covers experts alone",
        "moe_routing is natural",
    ]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"param_dtype": "fp8 params"}, "keeps its weights in 8 bits"),
        ({"param_dtype": "pure bf16"}, "precision bf16-pure is not a recipe of megatron"),
        ({"overlap_flags": "activation CPU offload of 20 layers"}, "activations that wait in host memory"),
        ({"precision": "fp8 (MS-AMP)"}, "precision fp8-msamp is not a recipe of megatron"),
    ],
)
def test_what_the_accounts_have_no_word_for_is_said_so(row: dict[str, str], complaint: str) -> None:
    with pytest.raises(Unsupported, match=complaint):
        scenario({**ROW, **row})


def test_a_layout_in_numbers_must_add_up() -> None:
    with pytest.raises(Unclear, match="it has 3 stages and 22 layers, not 2 and 22"):
        scenario({**PIPELINE, "pp_layout": "8 7 7"})
