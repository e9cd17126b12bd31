"""The answer of `prove` over runs that did not happen: verdict, exit code, JSON keys and screens."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from command_line import check_golden, run
from fake_runs import Fake, Spoil, doubled_call
from test_cli_answers import shape
from test_cli_fuzz import flags
from trainledger.runtime.launch.failure import RankFailed
from trainledger.runtime.observe.observation import Observation, Unclaimed
from trainledger.runtime.spec import RunSpec
from trainledger.service import prove
from trainledger.service.prove_launch import How, Progress
from trainledger.service.prove_plan import Planned

MOE = ("mixtral-8x7b", "--dp", "2", "--ep", "2", "--zero", "1", "--precision", "bf16")
PIPE = ("llama-3-8b", "--pp", "2", "--tp", "2", "--recompute", "full")
LOST = Unclaimed(bytes=4096, dtype="fp32", shape=(1024,), op="aten::zeros", phase="optimizer")


MODELS = ("llama-3-8b", "mixtral-8x7b", "deepseek-v3", "gpt2", "phi-3-mini", "7e9")
EXAMPLES = 40


@st.composite
def plan_flags(draw: st.DrawFn) -> list[str]:
    """Degrees that may fit together, and words of other verbs."""
    degrees = draw(st.lists(st.sampled_from(("tp", "pp", "cp", "ep", "vpp", "mbs", "dp")), max_size=2, unique=True))
    typed = [part for name in degrees for part in (f"--{name}", str(draw(st.sampled_from((2, 3)))))]
    return [*typed, "--zero", str(draw(st.integers(0, 3))), *draw(flags())[-2:]]


def ways() -> st.SearchStrategy[list[str]]:
    """How it is run."""
    choices = (
        ["--dry"],
        ["--full-size"],
        ["--steps", "3"],
        ["--no-early-stop"],
        ["--precision", "bf16"],
        ["--steps=2"],
    )
    return st.sampled_from(choices)


def smaller_weight(seen: Observation) -> Observation:
    """On rank 1 the first weight is held in half of its bytes."""
    if seen.rank != 1:
        return seen
    held = tuple(
        msgspec.structs.replace(
            one, claimed={k: v // 2 if i == 0 else v for i, (k, v) in enumerate(one.claimed.items())}
        )
        for one in seen.held
    )
    return msgspec.structs.replace(seen, held=held)


def lost_storage(seen: Observation) -> Observation:
    """A storage that nothing claims, from the end of the backward on."""
    held = tuple(msgspec.structs.replace(one, unclaimed=(LOST,)) if one.instant != "loss" else one for one in seen.held)
    return msgspec.structs.replace(seen, held=held)


def unknown_call(seen: Observation) -> Observation:
    """A collective of a kind that the plan does not have."""
    return msgspec.structs.replace(
        seen, calls=(*seen.calls, msgspec.structs.replace(seen.calls[0], op="broadcast", dtype="int64", count=3))
    )


SPOILT: dict[str, Spoil] = {
    "doubled call": doubled_call,
    "smaller weight": smaller_weight,
    "lost storage": lost_storage,
    "unknown call": unknown_call,
}


def unchecked(plan: Planned) -> None:
    """Whatever is installed here."""
    del plan


def faked(monkeypatch: pytest.MonkeyPatch, spoil: Spoil | None = None) -> Fake:
    """The command line over a fake runner."""
    fake = Fake(spoil)
    monkeypatch.setattr(prove, "launch", fake)
    monkeypatch.setattr(prove, "check_runtime", unchecked)
    return fake


def test_what_is_seen_as_predicted_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    faked(monkeypatch)
    for arguments in (MOE, PIPE, ("gpt2", "--dp", "3", "--zero", "3"), ("deepseek-v3",)):
        done = run("prove", *arguments, "--json")
        found = done.json()
        assert (done.code, found["verdict"]) == (0, "proven"), arguments
        assert found["unexplained"] == {"bytes": 0, "calls": 0, "items": []}
        assert {line["verdict"] for line in found["lines"]} == {"equal", "reported"}
        assert found["ranks"] == list(range(found["world_size"]))
        assert found["losses"] == [2.5, 2.25]


@pytest.mark.parametrize("name", SPOILT)
def test_what_is_not_as_predicted_is_said_and_ends_with_4(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    faked(monkeypatch, SPOILT[name])
    done = run("prove", *PIPE)
    assert (done.code, done.err) == (4, "")
    assert done.out.splitlines()[-1].startswith("differs: ")
    found = run("prove", *PIPE, "--json")
    assert (found.code, found.json()["verdict"]) == (4, "differs")


def test_the_keys_of_the_answer_are_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    faked(monkeypatch, lost_storage)
    found = run("prove", *MOE, "--json").json()
    found["assumed"] = None
    assert list(found)[-1] == "run"
    check_golden("prove_keys.json", json.dumps(shape(found), indent=1) + "\n")


def test_the_screen_ends_with_the_verdict_and_says_what_was_run(monkeypatch: pytest.MonkeyPatch) -> None:
    faked(monkeypatch)
    text = run("prove", *PIPE).out
    assert text.startswith("llama-3-8b on 4 ranks, engine pytorch (PyTorch 2.13.0)\n")
    assert "\nshrunken by 64: hidden 4,096 -> 64, layers 32 -> 2," in text
    assert text.splitlines()[-2] == "unexplained: 0 B, 0 calls"
    assert text.splitlines()[-1].startswith("proven: all ")
    assert "held/weights/model.embed_tokens.weight" not in text
    assert "held/weights/model.embed_tokens.weight" in run("prove", *PIPE, "--all").out
    assert "\nat full size\n" in run("prove", *PIPE, "--full-size").out


def test_a_dry_run_tries_one_of_the_ranks_that_should_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = faked(monkeypatch)
    found = run("prove", "llama-3-8b", "--dry", "--pp", "2", "--dp", "64", "--precision", "bf16", "--json").json()
    assert (found["world_size"], found["ranks"], found["dry"]) == (128, [0, 64], True)
    assert fake.how is not None
    assert (fake.how.dry, fake.how.ranks) == (True, (0, 64))


def test_where_and_how_long_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = faked(monkeypatch)
    run("prove", "gpt2", "--timeout", "30", "--cluster-args", "--nnodes 1 --log-dir 'a b'")
    assert fake.how is not None
    assert (fake.how.timeout_s, fake.how.cluster_args) == (30, ("--nnodes", "1", "--log-dir", "a b"))
    assert fake.how.rank_bytes > 1 << 28


def test_a_rank_that_fails_is_told_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(spec: RunSpec, how: How, progress: Progress | None) -> Sequence[Observation]:
        raise RankFailed(1, 3, "rank 1 of 2 raised ValueError: a\x1b[31m\n    File x\n    line 3")

    faked(monkeypatch)
    monkeypatch.setattr(prove, "launch", fails)
    done = run("prove", "gpt2", "--dp", "2")
    assert (done.code, done.out) == (1, "")
    assert done.err == "error: rank 1 of 2 raised ValueError: a\\x1b[31m\n    File x\n    line 3\n"


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["llama-3-8b", "mixtral-8x7b", "deepseek-v3", "gpt2", "phi-3-mini", "7e9"]), plan_flags(), ways()
)
def test_whatever_is_typed_is_proven_or_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, model: str, typed: list[str], way: list[str]
) -> None:
    faked(monkeypatch)
    done = run("prove", model, *typed, *way)
    assert done.code in {0, 1, 2}, done
    assert (done.err == "") == (done.code == 0)
    assert "internal error" not in done.err, (model, typed, way, done.err)
    assert done.err.count("\n") == (done.code != 0)


class Terminal(io.StringIO):
    """Standard error of somebody who watches."""

    def isatty(self) -> bool:
        return True


@dataclasses.dataclass
class Heard(Fake):
    """Notes whether it is asked to say how far it is."""

    asked: bool = False

    def __call__(self, spec: RunSpec, how: How, progress: Progress | None) -> Sequence[Observation]:
        self.asked = progress is not None
        return Fake()(spec, how, progress)


@pytest.mark.parametrize(("flag", "asked"), [("--all", True), ("--json", False)])
def test_progress_is_for_a_terminal_that_gets_no_json(monkeypatch: pytest.MonkeyPatch, flag: str, asked: bool) -> None:
    faked(monkeypatch)
    heard = Heard()
    monkeypatch.setattr(prove, "launch", heard)
    monkeypatch.setattr(sys, "stderr", Terminal())
    from trainledger.cli.main import main

    assert main(["prove", "gpt2", flag]) == 0
    assert heard.asked == asked
    run("prove", "gpt2")
    assert not heard.asked


def test_torch_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise prove.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(prove.importlib.metadata, "version", version)
    done = run("prove", "gpt2")
    assert (done.code, done.out) == (1, "")
    assert "pip install 'trainledger[train]'" in done.err
    monkeypatch.setattr(prove.importlib.metadata, "version", {"torch": "2.14.1+cpu"}.get)
    done = run("prove", "gpt2")
    assert done.code == 1
    assert "torch 2.14.1 is installed" in done.err
    assert "torch==2.13.0" in done.err


@pytest.mark.parametrize(
    ("code", "arguments", "said"),
    [
        (2, ("--dry", "--cluster-args", "--nnodes 2"), "--dry"),
        (2, ("--cluster-args", "'a"), "close the quotes"),
        (1, ("--timeout", "0"), "--timeout is 0"),
        (2, ("--clip-norm", "nan"), "'nan' is not a number"),
        (2, ("--clip-norm", "1_0"), "'1_0' is not a number"),
        (2, ("--steps", "1.5"), "'1.5' is not a whole number"),
    ],
)
def test_bad_flags_are_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, code: int, arguments: tuple[str, ...], said: str
) -> None:
    def never(*given: Any) -> Sequence[Observation]:  # noqa: ANN401 - it is not called
        raise AssertionError(given)

    monkeypatch.setattr(prove, "launch", never)
    done = run("prove", "llama-3-8b", *arguments)
    assert (done.code, done.out) == (code, ""), done
    assert said in done.err
