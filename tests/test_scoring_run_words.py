"""The cells of a run's row: which model, engine, layout and card they come to, and what they leave open."""

from __future__ import annotations

import pytest

from trainledger.facts.families import model_types
from trainledger.plans.limits import SEQ_LIMIT
from trainledger.scoring.cells import Cells
from trainledger.scoring.phrases import find, meanings, run_words
from trainledger.scoring.prediction import Unsupported
from trainledger.scoring.run_card import card_of
from trainledger.scoring.run_engine import date_of, engine_of, engine_readings, unread_release
from trainledger.scoring.run_layout import layout_of
from trainledger.scoring.run_model import model_of, model_readings
from trainledger.scoring.run_told import Recompute, told
from trainledger.scoring.words import Unclear

GPT = {"model": "gpt-tiny", "hidden": "64", "layers": "3", "heads": "4", "vocab": "100", "glu": "0", "seq_len": "32"}
LLAMA = {**GPT, "model": "tiny", "glu": "1", "ffn": "96", "kv_heads": "2", "tied_embeddings": "0"}
MOE = {**LLAMA, "num_experts": "8", "topk": "2", "moe_ffn": "32"}
TITAN = {"system": "torchtitan", "source_date": "2025-06", "num_gpus": "8", "mbs": "1", "gbs": "8", "seq_len": "64"}
MEGATRON = {**TITAN, "system": "Megatron-LM"}


def layout(row: dict[str, str]) -> dict[str, int]:
    cells = Cells(row)
    return layout_of(cells, engine_of(cells)).columns


def said(row: dict[str, str]) -> Recompute:
    cells = Cells({"precision": "bf16", **row})
    return told(cells, engine_of(cells)).recompute


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("llama3.1-405b", "llama"),
        ("Llama-3.1-8B", "llama"),
        ("qwen3-8b", "qwen3"),
        ("phi3-mini", "phi3"),
        ("DeepSeek_V3", "deepseek_v3"),
        ("meta-llama/Llama-2-7b-hf", "llama"),
    ],
)
def test_a_known_name_needs_no_sizes(name: str, family: str) -> None:
    assert model_of(Cells({"model": name})).family == family


def test_the_rows_sizes_are_written_over_those_of_its_name() -> None:
    cells = Cells({"model": "deepseek-v3", "layers": "4", "moe_layers": "3", "vocab": "1000", "hidden": "7168"})
    model = model_of(cells)
    assert (model.num_layers, model.vocab_size, model.blocks[0].layers) == (4, 1000, (0,))
    assert [len(block.layers) for block in model.blocks if block.moe is not None] == [3]


def test_an_unknown_name_with_the_sizes_of_a_known_model_is_that_model() -> None:
    sizes = {"hidden": "2048", "ffn": "10944", "heads": "16", "kv_heads": "16", "num_experts": "64", "moe_ffn": "1408"}
    row = {"model": "deepseek-of-ours", "layers": "2", "moe_layers": "1", "topk": "6", "glu": "1", **sizes}
    attention = model_of(Cells(row)).blocks[0].attention
    assert attention is not None
    assert attention.kv_lora_rank == 512
    with pytest.raises(Unclear, match="go through a low rank that no column states"):
        model_of(Cells({**row, "hidden": "2304"}))


@pytest.mark.parametrize(
    ("row", "family"),
    [
        (LLAMA, "llama"),
        (GPT, "gpt2"),
        ({**GPT, "kv_heads": "2"}, "starcoder2"),
        (MOE, "mixtral"),
        ({**MOE, "shared_experts": "1"}, "glm4_moe"),
        ({**MOE, "moe_layers": "2"}, "glm4_moe"),
        ({**MOE, "model": "qwen3-tiny", "head_dim": "16"}, "qwen3_moe"),
        ({**LLAMA, "model": "Mistral-tiny"}, "mistral"),
        ({**LLAMA, "model": "gpt-swiglu"}, "llama"),
    ],
)
def test_sizes_alone_make_a_model_of_their_shape(row: dict[str, str], family: str) -> None:
    model = model_of(Cells(row))
    assert (model.family, model.num_layers, model.hidden_size, model.vocab_size) == (family, 3, 64, 100)
    assert sum(len(block.layers) for block in model.blocks if block.moe is not None) == int(
        row.get("moe_layers", "3") if "num_experts" in row else 0
    )


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({**LLAMA, "hidden": ""}, "hidden is blank, and no model is known by the name 'tiny'"),
        ({**LLAMA, "vocab": ""}, "vocab is blank"),
        ({**LLAMA, "heads": "", "layers": ""}, "layers and heads are blank"),
        ({**LLAMA, "ffn": ""}, "ffn is blank"),
        ({**LLAMA, "glu": ""}, "glu is blank"),
        ({**LLAMA, "glu": "maybe"}, "glu is 'maybe'; it takes 1 or 0"),
        ({**LLAMA, "vocab": "many"}, "vocab is 'many', not a whole number"),
        ({**LLAMA, "heads": "5"}, "the heads must divide"),
        ({**MOE, "topk": ""}, "topk is blank"),
        ({**MOE, "topk": "9"}, "cannot visit more than the 8 experts"),
        ({**MOE, "glu": "0"}, "routed experts without a gate"),
        ({"model": "llama3-8b", "num_experts": "8", "hidden": "4096"}, "read as a llama without routed experts"),
        ({**GPT, "head_dim": "32"}, "head_dim is 32, and a gpt2 of the row's other sizes has 16"),
    ],
)
def test_a_model_that_a_row_leaves_open_is_not_guessed(row: dict[str, str], complaint: str) -> None:
    with pytest.raises(Unclear, match=complaint):
        model_of(Cells(row))


def test_gpt2s_vocabulary_and_width_stand_in_for_a_gpt_without() -> None:
    model = model_of(Cells({**GPT, "vocab": ""}))
    assert model.vocab_size == 50257
    mlp = model.blocks[0].mlp
    assert mlp is not None
    assert mlp.intermediate == 256


def test_families_and_words_of_the_data_exist() -> None:
    readings = model_readings()
    named = {name for family in readings.family for name in (family.dense, family.routed) if name}
    assert named | set(readings.shape.values()) <= set(model_types())
    for topic, phrases in run_words().items():
        spellings = [phrase for group in phrases.values() for phrase in group]
        assert len(spellings) == len(set(spellings)), topic
        assert all(phrase == phrase.lower() for phrase in spellings), topic


@pytest.mark.parametrize(
    ("topic", "text", "meaning"),
    [
        ("precision", "fp8 (MS-AMP: fp8 weights, fp16 master)", ["fp8", "fp8-msamp", "fp16"]),
        ("schedule", "Interleaved1F1B", ["interleaved"]),
        ("schedule", "zbv-formatted", ["zb-v"]),
        ("gradients", "fp32 accumulate and reduce-scatter", ["fp32"]),
        ("offload", "optimizer offload parameter offload ZeRO++", ["optimizer", "parameters"]),
        ("routing", "no idea", []),
        ("flags", "TP overlap off", []),
    ],
)
def test_phrases_are_found_in_a_cell(topic: str, text: str, meaning: list[str]) -> None:
    assert meanings(topic, text) == meaning


def test_a_number_in_a_phrase_is_read() -> None:
    assert [phrase.number for phrase in find("recompute_detail", "layer (every 3rd layer)")] == [3]


@pytest.mark.parametrize(
    ("system", "date", "engine"),
    [
        ("torchtitan+torchao", "2024-12", "torchtitan"),
        ("Megatron-LM (zero-bubble fork)", "2023-11", "megatron"),
        ("NeMo-Megatron (MLPerf)", "", "megatron"),
        ("primus-megatron", "2025", "megatron"),
        ("Megatron-LM+DeepSpeed ZeRO-3", "2021", "deepspeed"),
        ("deepspeed + transformers", "2024", "deepspeed"),
        ("fms-fsdp (PyTorch FSDP1)", "2024", "fsdp1"),
        ("llm-foundry", "2023-2024", "fsdp1"),
        ("HF Trainer, transformers 4.49", "2025", "pytorch"),
    ],
)
def test_a_system_is_an_engine(system: str, date: str, engine: str) -> None:
    assert engine_of(Cells({"system": system, "source_date": date})).engine == engine


@pytest.mark.parametrize(
    ("system", "error", "complaint"),
    [
        ("", Unclear, "system is blank"),
        ("my trainer", Unsupported, "is no engine that is read"),
        ("MaxText", Unsupported, "no engine profile tells what it keeps"),
    ],
)
def test_a_system_that_is_no_engine_is_said_so(system: str, error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        engine_of(Cells({"system": system}))


def test_dates_choose_between_readings() -> None:
    early, late, undated = (
        engine_of(Cells({"system": "torchtitan", "source_date": date})) for date in ("2025-04-07", "2025-04-08", "")
    )
    assert (early.pp_microbatches, late.pp_microbatches) == ("chunks", "")
    assert undated.reason == late.reason
    assert (date_of("2025"), date_of("about 2024-07, or later"), date_of("v2.5")) == ("2025-12-31", "2024-07-31", "")
    assert all(reading.reason and reading.cite for reading in engine_readings().engine if reading.engine)


@pytest.mark.parametrize(
    ("system", "version", "date", "release", "unread"),
    [
        ("Megatron-LM", "Megatron-LM 23e00ed (core 0.14) + TE 2.11", "", "0.14", False),
        ("megatron-core", "Megatron-Core r0.8.0", "", "0.8.0", False),
        ("megatron-core", "MCore 0.5, PyTorch 2.5", "", "", True),
        ("DeepSpeed", "DeepSpeed 0.14.2, PyTorch 2.2.0", "2024", "0.14.2", False),
        ("DeepSpeed", "v0.17", "", "", False),
        ("FSDP2", "torch 2.7.0a0", "", "2.7.0", False),
        ("torchtitan", "torchtitan v0.2.0", "2026-08", "0.2.0", False),
        ("torchtitan", "torch 2.9.0.dev", "2025-08", "2025-08-31", False),
        ("torchtitan", "", "", "", False),
        ("nanotron", "bench_cluster branch", "2024-07", "2024-07-31", False),
        ("nanotron", "", "2019", "", True),
    ],
)
def test_a_release_is_a_number_or_a_date(system: str, version: str, date: str, release: str, *, unread: bool) -> None:
    cells = Cells({"system": system, "framework_version": version, "source_date": date})
    reading = engine_of(cells)
    assert reading.framework_version == release
    assert bool(unread_release(cells, reading)) == unread


def test_a_layout_is_derived_where_the_row_is_silent() -> None:
    columns = layout({**MEGATRON, "num_gpus": "16", "tp": "2", "pp": "2", "gbs": "16", "zero_stage": "1"})
    assert (columns["dp_shard"], columns["num_microbatches"], columns["sp"]) == (4, 4, 1)
    assert layout({**TITAN, "mbs": "", "grad_accum": "2", "gbs": "32"})["mbs"] == 2
    assert layout({**TITAN, "gbs": "", "grad_accum": "4"})["num_microbatches"] == 4
    assert layout({**TITAN, "sequence_parallel": "1"})["sp"] == 0
    assert layout({**MEGATRON, "shard_note": "Megatron distributed optimizer"})["zero_stage"] == 1
    assert layout({**MEGATRON, "num_gpus": "1", "gbs": "1"})["zero_stage"] == 0


def test_experts_are_cut_as_their_engine_does_unasked() -> None:
    row = {**MEGATRON, "tp": "2", "ep": "2", "gbs": "4", "zero_stage": "1"}
    assert layout(row)["etp"] == 2
    assert layout({**row, "ep": "8"})["etp"] == 1
    assert layout({**row, "system": "torchtitan"})["etp"] == 1
    assert layout({**row, "etp": "1"})["etp"] == 1


@pytest.mark.parametrize(
    ("note", "extra", "replicas", "shards"),
    [
        ("FSDP2 full shard", {}, 1, 32),
        ("FSDP2 dp_shard 8", {}, 4, 8),
        ("Megatron-FSDP shard group 16", {}, 2, 16),
        ("FSDP=4 x DP=8", {}, 8, 4),
        ("HSDP (shard within node)", {"gpus_per_node": "8"}, 4, 8),
        ("hybrid", {"gpus_per_node": "8", "tp": "2", "num_gpus": "64"}, 8, 4),
    ],
)
def test_replicas_of_sharded_groups(note: str, extra: dict[str, str], replicas: int, shards: int) -> None:
    row = {**TITAN, "num_gpus": "32", "gbs": "32", "zero_stage": "3", "shard_note": note, **extra}
    columns = layout(row)
    assert (columns["dp_replicate"], columns["dp_shard"]) == (replicas, shards)


def test_a_pipeline_may_cut_its_batch_itself() -> None:
    row = {**TITAN, "pp": "2", "vpp": "2", "dp": "4", "gbs": "64"}
    old, new = ({**row, "source_date": date} for date in ("2025-04-07", "2025-04-08"))
    assert [layout(row)["mbs"] for row in (old, new, {**new, "pp_microbatches": "2"})] == [4, 1, 8]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({**TITAN, "seq_len": ""}, "seq_len is blank"),
        ({**TITAN, "seq_len": str(SEQ_LIMIT + 1)}, "seq_len is .*: at most"),
        ({**TITAN, "num_gpus": ""}, "num_gpus and dp are blank"),
        ({**TITAN, "dp": "4"}, "num_gpus is 8, and dp=4 x tp=1 x pp=1 x cp=1 is 4: they contradict"),
        ({**TITAN, "tp": "3"}, "num_gpus is 8, no multiple of tp=3"),
        ({**TITAN, "mbs": "", "gbs": "16"}, "mbs is blank, and gbs, dp and grad_accum do not decide it"),
        ({**TITAN, "grad_accum": "2"}, "gbs is 8, and mbs=1 x dp=8 x grad_accum=2 is 16"),
        ({**TITAN, "system": "deepspeed"}, "zero_stage and shard_note are blank"),
        ({**TITAN, "zero_stage": "4"}, "zero_stage is 4"),
        ({**TITAN, "tp": "99999999999"}, "at most"),
        ({**TITAN, "num_gpus": "32", "gbs": "32", "shard_note": "dp_shard 5"}, "groups of 5 do not divide dp=32"),
        ({**TITAN, "shard_note": "HSDP"}, "gpus_per_node is blank"),
    ],
)
def test_a_layout_that_a_row_leaves_open_is_not_guessed(row: dict[str, str], complaint: str) -> None:
    with pytest.raises(Unclear, match=complaint):
        layout(row)


@pytest.mark.parametrize(
    ("row", "recompute"),
    [
        ({"recompute": "none"}, Recompute(how="none")),
        ({"recompute": "full", "recompute_detail": "per-block activation checkpointing"}, Recompute(how="full")),
        ({"recompute": "selective", "recompute_detail": "every 2nd layer"}, Recompute(how="full", every=2)),
        ({"recompute": "full", "recompute_detail": "block method, 5 layers"}, Recompute(how="full", blocks=5)),
        ({"recompute": "selective", "recompute_detail": "per-op SAC"}, Recompute(how="selective", parts=("ops",))),
        ({"recompute": "selective"}, Recompute(how="selective")),
        ({}, Recompute(how="selective")),
        (
            {"recompute": "selective", "recompute_detail": "layernorm,moe_act"},
            Recompute(how="selective", parts=("layernorm", "moe_act")),
        ),
    ],
)
def test_words_of_recompute(row: dict[str, str], recompute: Recompute) -> None:
    assert said({**TITAN, **row}) == recompute


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"precision": ""}, "precision is blank"),
        ({"precision": "int3"}, "names no arithmetic that is known"),
        ({"recompute": "sometimes"}, "recompute is 'sometimes', which holds no word that is known"),
        ({"recompute": "selective", "recompute_detail": "ratio p; not stated"}, "leaves open what is recomputed"),
        ({"system": "deepspeed"}, "recompute is blank"),
        ({"grad_dtype": "wide"}, "grad_dtype is 'wide'"),
        ({"optimizer": "shampoo"}, "optimizer is 'shampoo'"),
        ({"loss": "chunked"}, "loss_chunks is blank"),
        ({"pp_schedule": "1f1b or gpipe"}, "means 1f1b and gpipe at once"),
        ({"pp_layout": "somehow"}, "pp_layout is 'somehow'"),
        ({"compile": "2"}, "compile is '2'"),
    ],
)
def test_words_that_are_not_known_are_not_guessed(row: dict[str, str], complaint: str) -> None:
    cells = Cells({**TITAN, "precision": "bf16", **row})
    with pytest.raises(Unclear, match=complaint):
        told(cells, engine_of(cells))


def test_what_an_engine_does_unasked_is_listed() -> None:
    cells = Cells({**TITAN, "precision": "fp8"})
    found = told(cells, engine_of(cells))
    assert (found.precision, found.allocator) == ("fp8-tensorwise", "")
    assert [text.partition(":")[0] for text in found.assumed] == [
        "precision says fp8 alone",
        "recompute is blank",
    ]


@pytest.mark.parametrize(
    ("gpu", "memory", "card"),
    [
        ("H100-SXM-80GB", "80", "H100-SXM5-80GB"),
        ("H100-SXM", "", "H100-SXM5-80GB"),
        ("A100-SXM", "40", "A100-SXM4-40GB"),
        ("H100", "96", "H100-SXM-96GB-HBM2e"),
        ("B200", "180", "B200-SXM"),
        ("a card of mine", "80", None),
        ("", "80", None),
    ],
)
def test_a_card_is_told_by_its_name_and_memory(gpu: str, memory: str, card: str | None) -> None:
    found = card_of(Cells({"gpu": gpu, "gpu_mem_gb": memory}))
    assert (found.name if found else None) == card
