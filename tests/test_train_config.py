"""A CONFIG becomes a run, or is refused before there is a process: with the value, the rule and the knob."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from command_line import answer, run
from train_files import config
from trainledger.errors import TrainledgerError
from trainledger.runtime.checkpoint.folders import name_of
from trainledger.runtime.train.spec import TOLD
from trainledger.service.train_config import configured
from trainledger.service.train_plan import ready
from trainledger.service.train_request import Request


def test_a_config_says_what_every_rank_is_told(tmp_path: Path) -> None:
    spec = ready(Request(model=config(tmp_path, run={"warmup": 2, "async": False, "weight-decay": 0.5}))).spec
    assert (spec.run.steps, spec.run.learning_rate, spec.warmup_steps) == (6, 3e-3, 2)
    assert (spec.asynchronous, spec.run.weight_decay, spec.resume) == (False, 0.5, False)
    assert (spec.plan["zero_stage"], spec.plan["dp_shard"], spec.run.seq) == (3, 2, 32)
    assert Path(spec.data.train).match(f"{tmp_path}/run/tokens/*/train.tokens")
    assert spec.data.eval_sequences == 5
    assert spec.min_learning_rate == pytest.approx(3e-4), "a tenth of the highest, unless it is said"


def test_flags_go_before_the_config(tmp_path: Path) -> None:
    request = Request(model=config(tmp_path), precision="bf16", zero=1, steps=9, checkpoint_every=0)
    spec = ready(request).spec
    assert (spec.run.precision, spec.plan["zero_stage"], spec.run.steps, spec.checkpoint_every) == ("bf16", 1, 9, 0)


def test_a_run_without_a_config_is_asked_for_by_flags(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    given = msgspec.structs.replace(configured(Request(model=config(tmp_path))), model="llama-3-8b", text=(str(text),))
    assert ready(given).spec.run.steps == 6


def test_a_config_is_a_plan_for_other_verbs_and_run_by_this_package(tmp_path: Path) -> None:
    found = answer("ledger", config(tmp_path))
    assert found["plan"]["engine"] == "pytorch"
    assert found["plan"]["zero_stage"] == 3


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"run": {"stepz": 3}}, "'stepz' is not a known key of [run]"),
        ({"run": {"text": ["a"]}}, "text belongs into [data]"),
        ({"data": {"steps": 3}}, "steps belongs into [run]"),
        ({"plan": {"dtaa": 1}}, "nearest: data"),
        ({"run": {"steps": "many"}}, "steps is 'many': expected `int`"),
        ({"run": {"fp8-action": "shout"}}, "invalid enum value 'shout'; write warn or bf16 or stop"),
        ({"run": {"learning-rate": 0.0}}, "--learning-rate is 0.0: it must be above 0"),
        ({"run": {"spike-factor": 0.5}}, "a spike is above the median"),
        ({"run": {"keep-last": 0}}, "keep-last"),
        ({"data": {"tokens": "a.tokens"}}, "both are given; name one of them"),
        ({"data": {"held-out-tokens": "a.tokens"}}, "--held-out-tokens is for --tokens"),
        ({"data": {"text": ["absent.txt"]}}, "absent.txt cannot be read as text"),
        ({"data": {"tokenizer": "absent.json"}}, "absent.json"),
        ({"data": {"held-out": 0.9}}, "held-out is 0.9"),
        ({"data": {"text": [""]}}, "--text is empty; name a file"),
        ({"data": {"tokenizer": ""}}, "--tokenizer is empty; name a file, or leave it out"),
        ({"run": {"out": ""}}, "--out is empty; name a folder, or leave it out"),
        ({"run": {"learning-rate": 1e9}}, "--learning-rate is 1e+09: it is not above 1e+06"),
        ({"run": {"min-learning-rate": 0.1}}, "--min-learning-rate is 0.1, and the rate falls to it from"),
        ({"run": {"weight-decay": 1e9}}, "--weight-decay is 1e+09: it is not above 1e+06"),
        ({"run": {"clip-norm": 1e39}}, "--clip-norm is 1e+39: it is not above 1e+30"),
        ({"run": {"fp8-saturated": 5.0}}, "--fp8-saturated is 5: it is not above 1;"),
        ({"run": {"initial-scale": 1e39}}, "--initial-scale is 1e+39: it is not above"),
        ({"run": {"minimum-scale": 131072.0}}, "--minimum-scale is 131072, and the scale begins at --initial-scale"),
        ({"plan": {"seq": 40_000}}, "[data-length]"),
        ({"plan": {"seq": 2048, "gbs": 2}}, "[data-held-out]"),
        ({"plan": {"dp": 200, "gbs": 200}}, "[runtime-ranks]"),
    ],
)
def test_what_cannot_be_run_is_refused_before_there_is_a_run_folder_to_lose(
    tmp_path: Path, tables: dict[str, dict[str, object]], message: str
) -> None:
    done = run("train", config(tmp_path, **tables))
    assert done.code in (1, 2)
    assert message in done.err
    assert done.out == ""
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("head", ["[[run]]", "run = 5\n[data.x]"])
def test_a_table_that_is_none_is_told_from_a_key_that_is_unknown(tmp_path: Path, head: str) -> None:
    path = Path(config(tmp_path))
    path.write_text(path.read_text().partition("\n[data]")[0] + f"\n{head}")
    for verb in ("train", "check", "ledger"):
        done = run(verb, str(path))
        assert (done.code, done.out) == (1, "")
        assert "run is no table of keys; write [run] on a line of its own" in done.err


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e400"])
def test_numbers_that_no_flag_can_be_are_refused_in_a_config(tmp_path: Path, value: str) -> None:
    path = Path(config(tmp_path))
    whole = path.read_text()
    for key in ("learning-rate", "min-learning-rate", "spike-factor", "clip-norm", "fp8-flushed"):
        path.write_text(re.sub(f"^{key} = .*\n", "", whole, flags=re.MULTILINE) + f"\n{key} = {value}\n")
        for verb in ("train", "check"):
            done = run(verb, str(path))
            assert done.code == 1
            assert "must be a finite number" in done.err
            assert key in done.err


def test_check_asks_of_a_run_what_train_does(tmp_path: Path) -> None:
    for table, key, value in (
        ("run", "keep-last", 0),
        ("run", "seed", -1),
        ("run", "clip-norm", -1.0),
        ("data", "held-out", 0.9),
    ):
        done = run("check", config(tmp_path, **{table: {key: value}}))
        assert (done.code in (1, 2), done.out) == (True, "")
        assert f"--{key} is {value}: " in done.err


def test_a_text_of_one_line_has_nothing_to_hold_out_and_the_message_says_why(tmp_path: Path) -> None:
    path = config(tmp_path)
    (tmp_path / "text.txt").write_text("one line " * 2000)
    done = run("train", path)
    assert done.code == 1
    assert f"{tmp_path}/text.txt (18000 B) has no token: it is the lines that begin in the last 0.1" in done.err
    assert "held-out = 0 for none" in done.err
    with pytest.raises(TrainledgerError, match="--eval-every is 3, and would change nothing: no token is held out"):
        ready(Request(model=path, held_out=0.0))
    assert ready(Request(model=path, held_out=0.0, eval_every=0, eval_sequences=0)).spec.data.held_out == ""


def test_tokens_that_were_altered_are_refused_before_they_are_learned(tmp_path: Path) -> None:
    made = Path(ready(Request(model=config(tmp_path))).spec.data.train)
    raw = bytearray(made.read_bytes())
    raw[-2] ^= 1
    made.write_bytes(raw)
    given = msgspec.structs.replace(configured(Request(model=config(tmp_path))), text=None, held_out=None)
    with pytest.raises(TrainledgerError, match="was altered"):
        ready(msgspec.structs.replace(given, model="llama-3-8b", tokens=str(made)))


def test_a_text_that_was_refused_can_be_changed(tmp_path: Path) -> None:
    for share in (0.01, 0.1):
        request = Request(model=config(tmp_path, data={"held-out": share}, run={"eval-sequences": 40}))
        if share < 0.1:
            with pytest.raises(TrainledgerError, match="hold more text out"):
                ready(request)
        else:
            assert ready(request).spec.data.eval_sequences == 40


def test_the_number_of_steps_must_be_said(tmp_path: Path) -> None:
    path = Path(config(tmp_path))
    path.write_text(path.read_text().replace("steps = 6", ""))
    done = run("train", str(path))
    assert done.code == 2
    assert "--steps N" in done.err


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    made = ready(Request(model=config(tmp_path))).spec.data.train
    request = configured(Request(model=config(tmp_path)))
    again = msgspec.structs.replace(request, text=None, held_out=None, tokens=made, tokenizer="bytes")
    assert ready(again).spec.data.held_out.endswith("held-out.tokens"), "the file beside it"
    other = tmp_path / "tokenizer.json"
    other.write_text(
        '{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null, '
        '"pre_tokenizer": null, "post_processor": null, "decoder": null, '
        '"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
    )
    with pytest.raises(TrainledgerError, match=r"\[data-tokenizer\].*was made by the tokenizer bytes"):
        ready(msgspec.structs.replace(again, tokenizer=str(other)))


def test_a_vocabulary_larger_than_the_models_is_refused(tmp_path: Path) -> None:
    sizes = [
        f"{key}={value}" for key, value in {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}.items()
    ]
    small = [*sizes, "num_key_value_heads=1", "head_dim=16", "intermediate_size=32", "vocab_size=128"]
    with pytest.raises(TrainledgerError, match=r"\[data-vocabulary\].*vocabulary of 256.*128"):
        ready(Request(model=config(tmp_path, plan={"set": small})))


def test_a_folder_with_checkpoints_is_not_begun_anew_and_one_without_a_run_is_not_gone_on_with(tmp_path: Path) -> None:
    path = config(tmp_path)
    with pytest.raises(TrainledgerError, match="has no run to go on with; check --out"):
        ready(Request(model=path, resume=True))
    saved = tmp_path / "run" / "checkpoints" / name_of(3)
    saved.mkdir(parents=True)
    with pytest.raises(TrainledgerError, match="has 1 checkpoints of a run, the newest step-00000003; go on"):
        ready(Request(model=path))
    with pytest.raises(TrainledgerError, match=r"step-00000003/manifest\.json cannot be read .* start anew"):
        ready(Request(model=path, resume=True))
    saved.rmdir()
    (tmp_path / "run" / TOLD).touch()
    assert ready(Request(model=path, resume=True)).spec.resume, "a run that died before it had saved"
