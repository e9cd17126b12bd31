"""What an answer takes where nothing is said, and how it says so."""

from __future__ import annotations

from typing import Any, Protocol

import pytest

import trainledger
from command_line import answer, run
from trainledger.service.common import Note


class _Answer(Protocol):
    @property
    def notes(self) -> tuple[Note, ...]: ...


EIGHT = {"gpus": 8, "mbs": 1}


@pytest.mark.parametrize(
    ("engine", "zero"),
    [
        ("paper", 0),
        ("pytorch", 0),
        ("fsdp", 3),
        ("fsdp2", 3),
        ("ddp", 0),
        ("torchtitan", 3),
        ("megatron", 0),
        ("deepspeed", 0),
        ("nanotron", 1),
    ],
)
def test_the_zero_stage_is_what_the_engine_does_unless_it_is_told(engine: str, zero: int) -> None:
    found = trainledger.ledger("llama-3-8b", engine=engine, **EIGHT)
    assert found.plan.zero_stage == found.assumed["zero"] == zero
    told = trainledger.ledger("llama-3-8b", engine=engine, zero=zero, **EIGHT)
    assert "zero" not in told.assumed
    assert told.memory == found.memory


def test_older_releases_of_torchtitan_divide_too() -> None:
    found = trainledger.ledger("llama-3-8b", engine="torchtitan", framework_version="2024-04", **EIGHT)
    assert found.plan.zero_stage == 3


@pytest.mark.parametrize(
    ("flags", "zero"),
    [
        ({"gpus": 1}, 0),
        ({"gpus": 8, "dp_replicate": 4}, 3),
        ({"gpus": 2, "cp": 2}, 3),
        ({"gpus": 1, "offload": "parameters"}, 3),
    ],
    ids=["alone", "replicas of shards", "context ranks share", "offloading divides"],
)
def test_nothing_is_divided_where_a_rank_has_nobody_to_share_with(flags: dict[str, Any], zero: int) -> None:
    assert trainledger.ledger("llama-3-8b", engine="torchtitan", **flags).plan.zero_stage == zero


def test_check_takes_the_same() -> None:
    message = "CUDA out of memory. Tried to allocate 2.00 GiB."
    flags = ("--model", "llama-3-8b", "--engine", "torchtitan", "--gpus", "8")
    found = answer("check", message, *flags, code=5)
    assert found["plan"]["zero_stage"] == found["assumed"]["zero"] == 3


def remarks(found: _Answer) -> set[str]:
    return {note.message.split(" ", 2)[1] for note in found.notes if note.rule == "engine-profile"}


def test_an_engine_remarks_on_the_plans_that_are_shown_alone() -> None:
    """By their second word: what zero_stages are called, what a pipeline keeps, what the first step lacks."""
    flags: dict[str, Any] = {"engine": "torchtitan", "gpus": 8, "gbs": 16}
    for more, expected in (
        ({}, {"first"}),
        ({"zero": 2}, {"first", "2"}),
        ({"pp": 2}, {"first", "pipeline"}),
        ({"pp": 2, "zero": 0, "dp": 4}, {"first"}),
    ):
        assert remarks(trainledger.ledger("llama-3-8b", **flags, **more)) == expected


def test_deepspeed_says_of_zero_3_how_the_model_is_taken_to_be_made() -> None:
    for zero, expected in ((2, set()), (3, {"as"})):
        assert remarks(trainledger.ledger("llama-3-8b", engine="deepspeed", gpus=8, zero=zero)) == expected


def test_a_search_and_a_table_of_stages_remark_on_what_they_list() -> None:
    searched = trainledger.plan("llama-3-8b", engine="megatron", gpus=2, gpu="h200", zero=1, pp=1)
    assert remarks(searched) == set()
    sharded = trainledger.plan("llama-3-8b", engine="megatron", gpus=2, gpu="h200", zero=3, pp=1)
    assert sharded.plans
    assert remarks(sharded) == {"2"}
    assert remarks(trainledger.states("llama-3-8b", engine="torchtitan", gpus=8)) == {"first", "2"}


def test_a_search_says_what_a_global_batch_that_nobody_gave_leaves_out() -> None:
    """One sequence a rank is left for each of 8: mbs 2 needs 16 of them."""
    flags: dict[str, Any] = {"engine": "pytorch", "gpus": 8, "gpu": "h200", "zero": 3, "tp": 1, "pp": 1, "cp": 1}
    silent = trainledger.plan("llama-3-8b", **flags)
    [note] = [note for note in silent.notes if note.rule == "gbs-assumed"]
    assert silent.gbs == silent.assumed["gbs"] == 8
    assert "--gbs" in note.message
    assert {one.plan["mbs"] for one in silent.plans} == {1}
    given = trainledger.plan("llama-3-8b", gbs=64, **flags)
    assert "gbs-assumed" not in {note.rule for note in given.notes}
    assert {one.plan["mbs"] for one in given.plans} >= {1, 2}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--engine", "torchtitan"), "recompute full, allocator expandable"),
        (
            ("--engine", "torchtitan", "--compile", "on", "--recompute", "selective", "--allocator", "default"),
            "recompute selective (ops), compile on, loss compiled",
        ),
        (
            ("--engine", "torchtitan", "--loss", "chunked", "--allocator", "default"),
            "recompute full, loss chunked, loss-chunks 8",
        ),
        (
            ("--engine", "megatron", "--recompute", "selective", "--recompute-parts", "mlp,core_attn"),
            "recompute selective (mlp, core_attn)",
        ),
        (
            ("--engine", "megatron", "--recompute-layers", "3", "--loss", "fused"),
            "recompute full of the first 3 layers of each virtual stage, loss fused",
        ),
        (("--engine", "pytorch", "--attention", "eager", "--cp", "2"), "recompute full, attention eager, cp-comm ring"),
    ],
)
def test_the_plan_line_says_what_decides_the_answer(flags: tuple[str, ...], expected: str) -> None:
    lines = run("ledger", "llama-3-8b", "--gpus", "8", *flags).out.splitlines()
    [plan] = [line for line in lines if line.startswith("plan: ")]
    assert plan.endswith(f" a rank), {expected}")


@pytest.mark.parametrize(
    ("part", "tp", "said"), [("mla_up_proj", 2, True), ("mla_up_proj", 1, False), ("mlp", 2, False)]
)
def test_what_is_sent_again_and_not_counted_is_said(part: str, tp: int, said: bool) -> None:
    flags: dict[str, Any] = {"engine": "megatron", "gpus": 8, "ep": 8, "etp": 1, "tp": tp, "recompute": "selective"}
    found = trainledger.ledger("deepseek-v3", recompute_parts=part, **flags)
    assert ("recompute-gathers-uncounted" in {note.rule for note in found.notes}) == said


@pytest.mark.parametrize(
    ("written", "ours"),
    [
        # https://github.com/huggingface/transformers/blob/v4.44.0/src/transformers/training_args.py OptimizerNames
        (("--optimizer", "adamw_torch"), ("--optimizer", "adamw")),
        (("--optimizer", "adamw_torch_fused"), ("--optimizer", "adamw-fused")),
        (("--optimizer", "adamw_bnb_8bit"), ("--optimizer", "adamw-8bit")),
        # https://github.com/NVIDIA/Megatron-LM/blob/core_r0.8.0/megatron/training/arguments.py --optimizer
        (("--optimizer", "adam"), ("--optimizer", "adamw")),
        (("--engine", "FSDP"), ("--engine", "fsdp")),
        (("--engine", "PyTorch"), ("--engine", "pytorch")),
    ],
)
def test_a_name_of_another_program_answers_as_ours_does(written: tuple[str, str], ours: tuple[str, str]) -> None:
    asked = ("ledger", "gpt2", "--gpus", "4", *(() if "--engine" in ours else ("--engine", "pytorch")))
    theirs, known = (answer(*asked, *flags) for flags in (written, ours))
    assert theirs["memory"] == known["memory"]
    assert theirs["lines"] == known["lines"]


def test_an_optimizer_that_keeps_something_else_is_no_other_name() -> None:
    # paged moments leave the card as it fills: https://github.com/bitsandbytes-foundation/bitsandbytes PagedAdamW8bit
    done = run("ledger", "gpt2", "--optimizer", "paged_adamw_8bit")
    assert done.code == 1
    assert "nearest: adamw" in done.err
