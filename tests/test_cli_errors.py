"""Bad input: an exit code, the value seen, the rule it breaks, the knob to turn; and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import run
from trainledger.cli.flags import flags
from trainledger.cli.verbs import VERBS, Verb

CASES: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    # name: exit code, arguments, what the message holds
    "no model": (2, ("states",), ("no model", "list models", "--hidden")),
    "unknown verb with --help": (2, ("nope", "--help"), ("nope", "Available commands", "ledger")),
    "unknown verb": (2, ("state",), ("state", 'mean "states"')),
    "unknown flag": (2, ("states", "llama-3-8b", "--gpux", "8"), ("--gpux", "--gpu")),
    "no value": (2, ("states", "llama-3-8b", "--tp"), ("--tp", "requires an argument")),
    "not a number": (2, ("states", "llama-3-8b", "--gpus", "many"), ("--gpus", "many")),
    "twice": (2, ("states", "llama-3-8b", "--tp", "1", "--tp", "2"), ("--tp", "multiple times")),
    "too many words": (2, ("states", "llama-3-8b", "llama-3-70b"), ("llama-3-70b",)),
    "not a choice": (1, ("ledger", "llama-3-8b", "--recompute", "some"), ("--recompute some", "none, full")),
    "no unit": (1, ("ledger", "gpt2", "--gpu", "h100", "--reserve", "4GiB"), ("--reserve '4GiB'", "KiB", "or 0")),
    "unknown model": (1, ("states", "llama-3-80b"), ("'llama-3-80b'", "nearest", "llama-3-8b")),
    "a model like no other": (1, ("states", "zzqqxx"), ("'zzqqxx'", "`trainledger list models` shows", "ORG/NAME")),
    "a card like no other": (1, ("states", "gpt2", "--gpu", "zz"), ("'zz'", "`trainledger list accelerators` shows")),
    "unknown engine": (1, ("states", "llama-3-8b", "--engine", "megatorn"), ("'megatorn'", "megatron")),
    "unknown card": (1, ("states", "llama-3-8b", "--gpu", "h1000"), ("'h1000'", "h100")),
    "unknown cluster": (1, ("states", "llama-3-8b", "--cluster", "dgx-h1000"), ("'dgx-h1000'", "dgx-h100")),
    "unknown optimizer": (1, ("states", "llama-3-8b", "--optimizer", "adan"), ("'adan'", "adamw")),
    "unknown recipe": (1, ("states", "llama-3-8b", "--precision", "fp7"), ("engine-precision", "fp7", "bf16")),
    "unknown list": (1, ("list", "modelz"), ("'modelz'", "models")),
    "unknown item": (1, ("list", "optimizer", "adamx"), ("'adamx'", "adamw")),
    "no release": (1, ("states", "gpt2", "--engine", "megatron", "--framework-version", "0.1"), ("0.1", "0.20.0")),
    "two cards": (2, ("states", "gpt2", "--gpu", "b200", "--cluster", "dgx-h100"), ("b200", "H100", "leave one")),
    "zero gpus": (1, ("states", "gpt2", "--gpus", "0"), ("--gpus is 0", "between 1 and")),
    "negative tp": (1, ("states", "gpt2", "--tp", "-2"), ("--tp is -2", "between 1 and")),
    "huge gpus": (1, ("states", "gpt2", "--gpus", "1" + "0" * 30), ("--gpus is 1000", "between 1 and")),
    "huge seq": (1, ("states", "gpt2", "--seq", "1" + "0" * 30), ("--seq is 1000", "between 1 and")),
    "huge mbs": (1, ("states", "llama-3-70b", "--seq", "134217728", "--mbs", "1000000"), ("2**62", "lower --seq")),
    "zero seq": (1, ("states", "gpt2", "--seq", "0"), ("--seq is 0", "at least 1")),
    "huge model": (1, ("states", "1e30"), ("1" + "0" * 30, "2**62")),
    "half a parameter": (1, ("states", "1.5"), ("1.5", "whole number", "70B")),
    "zero stage 4": (1, ("ledger", "gpt2", "--zero", "4"), ("--zero is 4", "between 0 and 3")),
    "sizes lacking": (2, ("states", "--hidden", "64"), ("--layers", "--heads", "--ffn", "--vocab")),
    "sizes and a name": (2, ("states", "gpt2", "--hidden", "64"), ("--hidden", "gpt2", "--set")),
    "set without =": (2, ("states", "gpt2", "--set", "n_layer"), ("n_layer", "KEY=VALUE")),
    "set twice": (2, ("states", "gpt2", "--set", "n_layer=1", "--set", "n_layer=2"), ("n_layer", "twice")),
    "set of a count": (2, ("states", "7B", "--set", "a=1"), ("--set", "7B")),
    "set unknown": (1, ("states", "gpt2", "--set", "n_layers=1"), ("n_layers", "n_layer")),
    "gpus do not divide": (2, ("ledger", "gpt2", "--gpus", "60", "--tp", "8"), ("60", "remainder 4", "56 or 64")),
    "wrong dp": (2, ("ledger", "gpt2", "--gpus", "64", "--dp", "3"), ("--dp is 3", "64 / 1 = 64", "leave --dp out")),
    "wrong replicas": (2, ("ledger", "gpt2", "--gpus", "8", "--dp-replicate", "3"), ("--dp-replicate 3", "of 8")),
    "wrong product": (
        2,
        ("ledger", "gpt2", "--gpus", "8", "--dp-replicate", "4", "--dp-shard", "4"),
        ("4 x --dp-shard 4 = 16", "leave one of them out"),
    ),
    "heads": (
        1,
        ("ledger", "llama-3-8b", "--gpus", "24", "--tp", "12"),
        ("[heads-divisible-by-tp]", "tp=12", "32 attention heads"),
    ),
    "vpp": (1, ("ledger", "gpt2", "--gpus", "2", "--pp", "2", "--vpp", "2"), ("[vpp-needs-interleaved]", "--schedule")),
    "gbs": (1, ("ledger", "gpt2", "--gpus", "4", "--gbs", "6"), ("[gbs-divisible]", "--gbs 6")),
    "a count has no heads": (1, ("ledger", "7B", "--gpus", "8", "--tp", "8"), ("[shapes-known]", "tp=8")),
    "no experts": (1, ("ledger", "gpt2", "--gpus", "2", "--ep", "2"), ("[ep-needs-experts]", "set ep to 1")),
    "no such stage": (
        1,
        ("ledger", "gpt2", "--engine", "deepspeed-estimator", "--zero", "1"),
        ("[engine-zero-stage]", "--zero 1", "2, 3"),
    ),
    "estimator has no tp": (
        1,
        ("states", "llama-3-8b", "--gpus", "8", "--tp", "8", "--engine", "deepspeed-estimator"),
        ("[engine-axis]", "--tp 8", "another --engine"),
    ),
    "qlora of nothing": (2, ("states", "gpt2", "--qlora"), ("--qlora", "--lora-rank")),
    "targets of nothing": (2, ("states", "gpt2", "--lora-targets", "q_proj"), ("--lora-targets", "--lora-rank")),
    "offload of what": (2, ("states", "gpt2", "--offload", "cpu"), ("'cpu'", "optimizer, parameters")),
    "layout of what": (2, ("ledger", "gpt2", "--pp-layout", "6,x"), ("'x'", "9,8,8,7")),
    "explain unknown": (1, ("ledger", "gpt2", "--explain", "weightz"), ("weightz", "nearest", "held/weights/weights")),
    "explain many": (1, ("ledger", "gpt2", "--explain", "held"), ("held", "lines", "give more of one")),
    "explain a sweep": (2, ("ledger", "gpt2", "--explain", "x", "--sweep", "gpus=1..2"), ("--explain", "--sweep")),
    "sweep of what": (1, ("ledger", "gpt2", "--sweep", "gpu=1..2"), ("'gpu'", "gpus")),
    "sweep without =": (2, ("ledger", "gpt2", "--sweep", "gpus"), ("gpus", "FLAG=VALUES")),
    "sweep downwards": (2, ("ledger", "gpt2", "--sweep", "gpus=8..4"), ("gpus=8..4", "rises")),
    "sweep of words": (2, ("ledger", "gpt2", "--sweep", "gpus=a,b"), ("'a'", "whole number")),
    "sweep refused": (2, ("ledger", "gpt2", "--tp", "3", "--sweep", "gpus=4,8"), ("remainder 1",)),
    "search without gpus": (2, ("plan", "gpt2", "--gpu", "h100"), ("--gpus 64",)),
    "search without card": (2, ("plan", "gpt2", "--gpus", "8"), ("--gpu h100",)),
    "search with dp": (2, ("plan", "gpt2", "--gpus", "8", "--gpu", "h100", "--dp", "8"), ("--dp 8", "leave it out")),
    "search of nothing": (2, ("plan", "gpt2", "--gpus", "8", "--gpu", "h100", "--tp", "3"), ("remainder 2",)),
    "top 0": (1, ("plan", "gpt2", "--gpus", "8", "--gpu", "h100", "--top", "0"), ("--top is 0", "between 1 and")),
    "no such plan file": (1, ("ledger", "nowhere.toml"), ("nowhere.toml", "no such file")),
    "no such ledger": (1, ("diff", "nowhere.json", "nowhere.json"), ("nowhere.json", "cannot be read")),
    "no such table": (1, ("score", "nowhere.csv"), ("nowhere.csv",)),
    "prove a count": (1, ("prove", "7B"), ("7B", "only shapes can be run", "--hidden")),
    "prove megatron": (1, ("prove", "gpt2", "--engine", "megatron"), ("[runtime-engine]", "--engine pytorch")),
    "prove fp8": (1, ("prove", "gpt2", "--precision", "fp8-rowwise"), ("[runtime-fp8-layers]", "[in, out]")),
    "prove no steps": (1, ("prove", "gpt2", "--steps", "0"), ("--steps is 0", "between 3 and")),
    "prove a norm": (2, ("prove", "gpt2", "--clip-norm=-1"), ("--clip-norm is -1.0", "0 leaves gradients alone")),
    "a number beyond": (2, ("prove", "gpt2", "--clip-norm", "1e308"), ("'1e308' has", "an exponent of more than two")),
    "prove no norm": (2, ("prove", "gpt2", "--clip-norm", "inf"), ("'inf' is not a number",)),
    "prove dry elsewhere": (2, ("prove", "gpt2", "--dry", "--cluster-args", "--nnodes=2"), ("--dry", "leave one")),
    "prove open quotes": (2, ("prove", "gpt2", "--cluster-args", "'"), ("close the quotes",)),
    "prove no time": (1, ("prove", "gpt2", "--timeout", "0"), ("--timeout is 0",)),
    "no such config": (1, ("model", "./nowhere/config.json"), ("nowhere", "config.json")),
}  # fmt: skip

INTEGER_FLAGS = [(verb, one.option) for verb in VERBS for one in flags(verb.service.Request) if one.type is int]
NO_INTEGERS = ("1.5", "8.0", "1e3", "1.5e3", "0x10", "1_000", "\u0663", "\u00b2", "", " ", "--8", "+", "1" * 101)


@pytest.mark.parametrize(("verb", "option"), INTEGER_FLAGS)
def test_a_number_is_whole_and_in_digits(verb: Verb, option: str) -> None:
    """cyclopts alone would read 1.5 as 2, 0x10 as 16 and 1_000 as 1000."""
    values = ["gpt2" for one in flags(verb.service.Request) if one.positional and one.required] or ["gpt2"]
    done = run(*verb.words, *values, f"--{option}=1.5")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: --{option}: '1.5' is not a whole number; write digits, such as ")


@pytest.mark.parametrize("text", NO_INTEGERS)
def test_what_is_no_whole_number(text: str) -> None:
    for arguments in (
        ("--tp", f"--tp={text}"),
        ("--pp-layout", f"--pp-layout=6,{text}"),
        ("--sweep", f"--sweep=tp={text}"),
    ):
        done = run("ledger", "gpt2", arguments[1])
        assert (done.code, done.out) == (2, ""), (arguments, done)
        assert arguments[0] in done.err


def test_a_sign_is_part_of_a_number() -> None:
    assert run("ledger", "gpt2", "--tp", "+2", "--gpus=+2").code == 0
    assert "--tp is -2" in run("ledger", "gpt2", "--tp=-2").err


@pytest.mark.parametrize("name", CASES)
def test_a_bad_command_says_what_is_wrong(name: str) -> None:
    code, arguments, holds = CASES[name]
    done = run(*arguments)
    assert (done.code, done.out) == (code, ""), done
    assert done.err.startswith("error: ")
    assert done.err.endswith("\n")
    assert done.err.count("\n") == 1
    for text in holds:
        assert text in done.err
    assert "Traceback" not in done.err
    assert "internal error" not in done.err


def test_an_error_is_text_with_json_too() -> None:
    done = run("states", "llama-3-80b", "--json")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: 'llama-3-80b'")


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("", "not JSON"),
        ('{"model_type": "llama",', "cut off"),
        ("[1, 2]", "a config is an object"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "hidden_size"),
        ('{"model_type": "llama", "hidden_size": -4}', "hidden_size"),
        ('{"model_type": "llamo"}', "llamo"),
        ('{"a": 1, "a": 2}', "twice"),
        ('{"a":' * 100_000, "nest"),
    ],
)
def test_a_bad_config_says_what_is_wrong(tmp_path: Path, text: str, holds: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    done = run("model", str(path))
    assert (done.code, done.out) == (1, "")
    assert holds in done.err


def test_a_fault_of_ours_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(request: object) -> object:
        raise ZeroDivisionError("half a\nline")

    monkeypatch.setattr("trainledger.service.list.run", broken)
    done = run("list", "models")
    assert done.code == 1
    assert done.err == (
        "error: internal error: ZeroDivisionError: half a\\nline; please report it with the command that you ran\n"
    )
