"""Whatever is typed, the command line ends with a known code and one sentence, never with a traceback."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command_line import run
from trainledger.service.sweep import NUMBERS

MODELS = st.sampled_from(
    ["llama-3-8b", "mixtral-8x7b", "deepseek-v3", "gpt2", "nemotron-h-56b", "7e9", "1e30", "", "custom"]
)
COUNTS = st.one_of(st.integers(-2, 16), st.sampled_from([64, 72, 4096, 1 << 20, 1 << 40, 10**30]))
COUNTED = tuple(name for name in (*NUMBERS, "largest-layer") if name != "zero")
"""Every number that a plan has; `--zero` is drawn beside them."""
WORDS = {
    "engine": ["paper", "pytorch", "torchtitan", "deepspeed", "deepspeed-estimator", "megatron",
               "nanotron", "megatron-deepspeed", "none"],
    "precision": ["bf16", "fp16", "fp32", "fp8-delayed", "mxfp8", "fp8-lm", "x"],
    "optimizer": ["adamw", "adamw-8bit", "muon", "adafactor", "sgd", "x"],
    "recompute": ["none", "full", "selective", "every-2", "every-0"],
    "recompute-parts": ["mlp", "core_attn,mlp", "x", ","],
    "loss": ["chunked", "eager", "x"],
    "allocator": ["default", "expandable", "x"],
    "compile": ["on", "off"],
    "dropout": ["on", "off"],
    "overlap-comm": ["on", "off"],
    "routing": ["balanced", "worst", "x"],
    "frozen-dtype": ["bf16", "nf4", "x"],
    "reserve": ["4 GiB", "0", "80 GiB", "999999999999999999 PB", "x"],
    "framework-version": ["0.20.0", "2026-02-30", "2025-04", "9.9", "x"],
    "schedule": ["1f1b", "interleaved", "zero-bubble"],
    "attention": ["flash", "eager"],
    "offload": ["optimizer", "parameters", "optimizer,parameters", ""],
    "lora-targets": ["q_proj", "all-linear", "nothing", ""],
    "pp-layout": ["16,16", "1", "-1,33", ""],
    "gpu": ["h100", "v100", "mi300x", "rtx-4090", "x"],
    "cluster": ["dgx-h100", "gb200-nvl72", "x"],
    "cp-comm": ["ring", "all_to_all", "all_gather"],
    "grad-dtype": ["bf16", "fp32", "fp8", "x"],
}  # fmt: skip
SWITCHES = ("sp", "no-sp", "qlora", "ema", "mtp")


@st.composite
def flags(draw: st.DrawFn) -> list[str]:
    numbers = draw(st.lists(st.sampled_from(COUNTED), max_size=4, unique=True))
    words = draw(st.lists(st.sampled_from(sorted(WORDS)), max_size=3, unique=True))
    typed = [part for name in numbers for part in (f"--{name}", str(draw(COUNTS)))]
    typed += [part for name in words for part in (f"--{name}", draw(st.sampled_from(WORDS[name])))]
    return typed + [f"--{name}" for name in draw(st.lists(st.sampled_from(SWITCHES), max_size=1))]


def check(*arguments: str) -> None:
    done = run(*arguments)
    assert done.code in {0, 1, 2, 3}
    assert "Traceback" not in done.err
    assert "internal error" not in done.err, (arguments, done.err)
    assert (done.err == "") == (done.code in {0, 3})
    if done.err:
        assert done.err.startswith("error: ")
        assert done.err.count("\n") == 1


HAVING = {"loss-chunks": ["--engine", "torchtitan", "--loss", "chunked"], "reduce-bucket": ["--engine", "deepspeed"]}
"""What makes a number count that counts for some engines alone."""


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("number", [10**20, 1 << 63, (1 << 62) + 1])
def test_a_number_beyond_any_count_is_refused_by_its_name(name: str, number: int) -> None:
    done = run("ledger", "llama-3-8b", *HAVING.get(name, ["--engine", "megatron"]), f"--{name}", str(number))
    assert done.code == 1
    assert f"--{name} is {number}: it must lie between" in done.err


def test_a_reserve_leaves_something_of_the_card_and_may_be_0() -> None:
    assert run("ledger", "gpt2", "--gpu", "h100", "--reserve", "0").code == 0
    for size in ("80 GiB", "999999999999999999 PB"):
        done = run("ledger", "llama-3-8b", "--gpu", "h100", "--reserve", size)
        assert (done.code, "--reserve is" in done.err, "keep less" in done.err) == (1, True, True)


@settings(max_examples=100, deadline=None)
@given(MODELS, flags())
def test_states(model: str, typed: list[str]) -> None:
    check("states", model, *typed)


@settings(max_examples=100, deadline=None)
@given(MODELS, flags(), st.integers(-1, 4))
def test_ledger(model: str, typed: list[str], zero: int) -> None:
    check("ledger", model, "--zero", str(zero), *typed)


@settings(max_examples=40, deadline=None)
@given(MODELS, flags(), st.sampled_from([1, 6, 16, 64]))
def test_plan(model: str, typed: list[str], gpus: int) -> None:
    check("plan", model, *typed, "--gpu", "h100", "--gpus", str(gpus))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=12), max_size=5))
def test_anything(words: list[str]) -> None:
    check(*words)


VERBS = ["model", "states", "ledger", "plan", "diff", "check", "predict", "score", "list"]
"""All that do no more than answer."""


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(VERBS), st.text(max_size=20))
def test_any_word_after_a_verb(verb: str, word: str) -> None:
    check(verb, word)
