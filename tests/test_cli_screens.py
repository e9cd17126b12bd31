"""What a pipe sees: golden screens, every option, and pages that say what the code says."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from command_line import ROOT, answer, check_golden, run
from trainledger.cli.flags import flags
from trainledger.cli.verbs import VERBS, Verb
from trainledger.report.document import Column, Text, left, table
from trainledger.report.plain import render

OWN_CONFIG = (
    '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, '
    '"intermediate_size": 128, "vocab_size": 1000}'
)
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 7.83 GiB (GPU 0; 79.15 GiB total capacity; 66.00 GiB already allocated; "
    "1.15 GiB free; 75.00 GiB reserved in total by PyTorch)"
)
SCREENS = {
    "states.txt": ("states", "llama-3-70b", "--gpus", "64", "--gpu", "h100"),
    "states_refused.txt": ("states", "llama-3-70b", "--gpus", "64", "--pp", "4", "--engine", "deepspeed"),
    "ledger.txt": ("ledger", "llama-3-8b", "--gpus", "16", "--tp", "2", "--engine", "megatron", "--zero", "1",
                   "--cluster", "dgx-h100"),
    "ledger_explain.txt": ("ledger", "llama-3-8b", "--gpus", "8", "--zero", "3", "--explain", "held/optimizer/master"),
    "ledger_sweep.txt": ("ledger", "llama-3-8b", "--gpu", "h100", "--zero", "3", "--tp", "2", "--sweep", "gpus=1..16"),
    "plan.txt": ("plan", "llama-3-8b", "--gpus", "16", "--gpu", "h100", "--engine", "megatron", "--top", "5"),
    "plan_nothing.txt": ("plan", "llama-3-70b", "--gpus", "8", "--gpu", "h100", "--engine", "megatron"),
    "diff.txt": ("diff", "examples/llama-3-70b-64xh100.toml", "examples/llama-3-70b-64xh100-pp.toml"),
    "check.txt": ("check", OUT_OF_MEMORY, "--model", "llama-3-8b", "--gpus", "8", "--zero", "3", "--mbs", "4", "--gpu",
                  "h100"),
    "check_inverted.txt": ("check", "logits = logits.float() CUDA out of memory. Tried to allocate 49.00 GiB.",
                           "--model", "llama-3-8b", "--gpus", "8", "--zero", "3", "--seq", "32768"),
    "ledger_fit.txt": ("ledger", "--fit-params", "--gpu", "h100", "--gpus", "64", "--tp", "2", "--zero", "1"),
    "model.txt": ("model", "mixtral-8x7b"),
    "help.txt": ("--help",),
    "help_ledger.txt": ("ledger", "--help"),
    "help_prove.txt": ("prove", "--help"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", SCREENS)
def test_screens(name: str) -> None:
    done = run(*SCREENS[name])
    assert done.err == ""
    check_golden(name, done.out)


def test_options_are_frozen() -> None:
    """One line per verb and option; a later version may add lines, and takes none away."""
    lines = [
        f"{verb.name} {' '.join(one.options)}{f' {one.value}' if one.value and not one.positional else ''}"
        for verb in VERBS
        for one in flags(verb.service.Request)
    ]
    check_golden("cli_options.txt", "\n".join(sorted(lines)) + "\n")


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_the_help_names_every_flag_and_each_has_a_meaning(verb: Verb) -> None:
    text = run(*verb.words, "--help").out
    for one in flags(verb.service.Request):
        assert all(option in text for option in one.options)
        assert one.description.endswith((".", "]."))


def test_later_work_is_absent() -> None:
    text = "".join(run(*verb.words, "--help").out for verb in VERBS) + run("--help").out
    for flag in ("--html", "--trace"):
        assert flag not in text
    for verb in ("emit", "serve", "calibrate", "reconcile"):
        assert run(verb).code == 2


def test_the_examples_are_plan_files_that_fit() -> None:
    """Those to train name no card, for they run on any machine."""
    files = {path: tomllib.loads(path.read_text()) for path in sorted(Path("examples").glob("*.toml"))}
    plans = {path: given for path, given in files.items() if "model" in given}
    assert plans
    for path, given in plans.items():
        done = run("ledger", str(path))
        assert (done.code, done.err) == (0, ""), path
        assert done.out.startswith("holds " if "run" in given else "fits, "), path


def test_what_is_sent_is_said_of_whom() -> None:
    """Three verbs, three sums: data parallelism alone, all axes of the busiest stage, all axes of the fullest one."""
    arguments = ("llama-3-8b", "--gpus", "8", "--pp", "2")
    states = run("states", *arguments).out
    assert "dp sent/step" in states
    swept = run("ledger", *arguments, "--sweep", "tp=1,2").out
    assert "sent/step: over all axes, per rank of the pipeline stage that sends most" in swept
    found = answer("ledger", *arguments)
    assert f"sent per step by pp_stage {found['memory']['pp_stage']}" in run("ledger", *arguments).out


def test_what_an_own_config_leaves_open_is_shown(tmp_path: Path) -> None:
    """A preset's defaults were checked when it was added; nobody has checked those of a file."""
    path = tmp_path / "own" / "config.json"
    path.parent.mkdir()
    path.write_text(OWN_CONFIG, encoding="utf-8")
    for verb in (("states",), ("ledger",), ("plan", "--gpus", "2", "--gpu", "h100")):
        text = run(verb[0], str(path), *verb[1:]).out
        assert "[config-as-read] not in the config, so the default of transformers" in text
        assert "tie_word_embeddings=false" in text
        preset = ("llama-3-8b", *verb[1:])
        assert "-as-read]" not in run(verb[0], *preset).out
    assert any(note["rule"] == "model-as-read" for note in answer("states", "llama-3-8b")["notes"])


def test_a_name_cannot_move_the_cursor(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[31m\u202eb" / "config.json"
    path.parent.mkdir()
    path.write_text(OWN_CONFIG, encoding="utf-8")
    for verb in ("model", "states", "ledger"):
        text = run(verb, str(path)).out
        assert "a\\x1b[31m\\u202eb" in text
        assert all(line.isprintable() for line in text.splitlines())
    saved = tmp_path / "saved.json"
    ledger = run("ledger", "gpt2", "--json").out
    saved.write_text(ledger.replace("held/weights/weights", "held/w\\u001b[31m\\n"), encoding="utf-8")
    other = tmp_path / "other.json"
    other.write_text(ledger, encoding="utf-8")
    text = run("diff", str(saved), str(other)).out
    assert "held/w\\x1b[31m\\n" in text
    assert "\x1b" not in text
    assert render([table([Column("\x1b")], [["\x07"]])]) == "\\x1b\n\\x07\n"


def test_a_search_that_no_rule_lets_pass_speaks_of_rules() -> None:
    """Not of memory: nothing was tried on the card."""
    arguments = ("gpt2", "--gpus", "16", "--gpu", "h100", "--gbs", "3")
    found = answer("plan", *arguments, code=3)
    assert (found["passing"], found["accepted"], found["smallest_change"]) == (0, 0, None)
    text = run("plan", *arguments).out
    assert text.startswith(f"no plan passes the rules: all {found['evaluated']:,} are rejected\n")
    assert "fits" not in text


def test_the_smallest_change_is_of_a_plan() -> None:
    arguments = ("llama-3-70b", "--gpus", "8", "--gpu", "h100", "--engine", "megatron")
    found = answer("plan", *arguments, code=3)
    change = found["smallest_change"]
    assert found["passing"] == found["rejected"]["states-do-not-fit"] + found["rejected"].get("does-not-fit", 0)
    text = run("plan", *arguments).out
    line = next(line for line in text.splitlines() if line.startswith("smallest change"))
    assert f"{change['knob']} from {change['before']} to {change['after']}, which makes the plan" in line
    for name in ("tp", "pp"):
        assert (f"{name} {change['plan'][name]}," in line) == (change["plan"][name] > 1)
    assert f"zero {change['plan']['zero_stage']}, mbs {change['plan']['mbs']}, recompute {change['recompute']}" in line


def test_degrees_that_are_fixed_are_named_as_they_are_typed() -> None:
    arguments = ("plan", "llama-3-8b", "--gpus", "8", "--gpu", "h100", "--zero", "1", "--dp-replicate", "1", "--no-sp")
    assert "\nfixed: dp-replicate 1, no-sp, zero 1\n" in run(*arguments).out


def test_tables_line_up() -> None:
    text = render([table([left("state"), Column("bytes"), Column("empty")], [["a", "1", ""], ["bcd", "100", ""]])])
    assert text == "state  bytes\na          1\nbcd      100\n"


def test_lines_are_not_wrapped_and_carry_no_trailing_blanks() -> None:
    for line in run("ledger", "llama-3-8b", "--gpus", "8", "--zero", "3").out.splitlines():
        assert line == line.rstrip()
    assert render([Text("x" * 300)]) == "x" * 300 + "\n"
