"""What a pipe sees: golden screens, every option, and pages that say what the code says."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from command_line import ROOT, check_golden, run
from trainledger.cli.flags import flags
from trainledger.cli.verbs import VERBS, Verb
from trainledger.report.document import Column, Text, left, table
from trainledger.report.plain import render

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
    "model.txt": ("model", "mixtral-8x7b"),
    "help.txt": ("--help",),
    "help_ledger.txt": ("ledger", "--help"),
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
    text = run(verb.name, "--help").out
    for one in flags(verb.service.Request):
        assert all(option in text for option in one.options)
        assert one.description.endswith((".", "]."))


def test_later_work_is_absent() -> None:
    text = "".join(run(verb.name, "--help").out for verb in VERBS) + run("--help").out
    for flag in ("--html", "--trace", "--loss", "--compile", "--allocator", "--tokens", "--usd-per-gpu-hour"):
        assert flag not in text
    for verb in ("train", "prove", "check", "emit", "serve", "calibrate", "reconcile"):
        assert run(verb).code == 2


def test_generated_pages_are_up_to_date() -> None:
    command = [sys.executable, "scripts/docs.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_examples_are_plan_files_that_fit() -> None:
    files = [path for path in sorted(Path("examples").glob("*.toml")) if "model" in tomllib.loads(path.read_text())]
    assert files
    for path in files:
        done = run("ledger", str(path))
        assert (done.code, done.err) == (0, ""), path
        assert done.out.startswith("fits: ")


def test_tables_line_up() -> None:
    text = render([table([left("state"), Column("bytes"), Column("empty")], [["a", "1", ""], ["bcd", "100", ""]])])
    assert text == "state  bytes\na          1\nbcd      100\n"


def test_lines_are_not_wrapped_and_carry_no_trailing_blanks() -> None:
    for line in run("ledger", "llama-3-8b", "--gpus", "8", "--zero", "3").out.splitlines():
        assert line == line.rstrip()
    assert render([Text("x" * 300)]) == "x" * 300 + "\n"
