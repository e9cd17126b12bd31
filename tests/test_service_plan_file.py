"""PLAN files, sweeps and differences: the same request by another way."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from command_line import ROOT, answer, run
from trainledger.errors import UsageError
from trainledger.service.models import parameter_count
from trainledger.service.requests import PlanRequest
from trainledger.service.sweep import NUMBERS, sweep_values

EVERY_KEY = """
model = "llama-3-8b"
set = ["num_hidden_layers=16"]
gpu = "h100"
gpus = 16
seq = 2048
gbs = 32
lora-rank = 0
ema = false
mtp = false
tp = 2
sp = true
pp = 2
vpp = 1
pp-layout = [9, 7]
cp = 1
ep = 1
dp-replicate = 1
dp-shard = 4
dp = 4
zero = 1
mbs = 2
recompute = "none"
schedule = "1f1b"
precision = "bf16"
grad-dtype = "bf16"
optimizer = "adamw"
offload = []
attention = "flash"
engine = "megatron"
framework-version = "0.20.0"
"""
FLAGS = (
    "--set num_hidden_layers=16 --gpu h100 --gpus 16 --seq 2048 --gbs 32 --tp 2 --sp --pp 2 --pp-layout 9,7 --zero 1 "
    "--mbs 2 --recompute none --grad-dtype bf16 --engine megatron --framework-version 0.20.0"
)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(EVERY_KEY, encoding="utf-8")
    return path


def test_a_plan_file_says_what_flags_say(plan: Path) -> None:
    by_file, by_flags = answer("ledger", str(plan)), answer("ledger", "llama-3-8b", *FLAGS.split())
    assert {**by_file, "assumed": None} == {**by_flags, "assumed": None}


def test_flags_go_over_the_file(plan: Path) -> None:
    before, after = answer("ledger", str(plan)), answer("ledger", str(plan), "--mbs", "1", "--no-sp")
    assert (before["plan"]["mbs"], before["plan"]["sp"]) == (2, True)
    assert (after["plan"]["mbs"], after["plan"]["sp"]) == (1, False)
    assert after["plan"]["num_microbatches"] == 2 * before["plan"]["num_microbatches"]


LISTS = {
    "offload": ('["optimizer"]', '"optimizer"', "optimizer"),
    "pp-layout": ("[9, 23]", '"9, 23"', "9,23"),
    "lora-targets": ('["k_proj", "v_proj"]', '"k_proj,v_proj"', "k_proj,v_proj"),
    "set": ('["max_position_embeddings=99"]', '"max_position_embeddings=99"', "max_position_embeddings=99"),
}


@pytest.mark.parametrize("key", LISTS)
def test_a_list_is_an_array_or_what_the_flag_takes(tmp_path: Path, key: str) -> None:
    path = tmp_path / "plan.toml"
    shared = 'model = "llama-3-8b"\ngpus = 4\npp = 2\nzero = 1\nlora-rank = 8\n'
    found = []
    for text in LISTS[key][:2]:
        path.write_text(f"{shared}{key} = {text}\n", encoding="utf-8")
        found.append(answer("ledger", str(path)))
    path.write_text(shared, encoding="utf-8")
    found.append(answer("ledger", str(path), f"--{key}", LISTS[key][2]))
    assert found[0] == found[1] == found[2] != answer("ledger", str(path))


def test_a_list_of_the_file_can_be_emptied(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    text = 'model = "llama-3-8b"\ngpus = 4\nzero = 1\n'
    path.write_text(f'{text}offload = "optimizer"\n', encoding="utf-8")
    assert answer("ledger", str(path))["memory"]["host_bytes"] > 0
    emptied = answer("ledger", str(path), "--offload", "none")
    assert emptied["memory"]["host_bytes"] == 0
    for none in ("", "offload = []\n", 'offload = "none"\n'):
        path.write_text(text + none, encoding="utf-8")
        assert answer("ledger", str(path)) == emptied


def test_a_file_is_looked_for_from_the_folder_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plans" / "sub").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    config = (
        '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, '
        '"intermediate_size": 128, "vocab_size": 1000}'
    )
    (tmp_path / "plans" / "sub" / "config.json").write_text(config, encoding="utf-8")
    card = (ROOT / "examples" / "own-card.toml").read_text(encoding="utf-8")
    (tmp_path / "plans" / "card.toml").write_text(card, encoding="utf-8")
    path = tmp_path / "plans" / "plan.toml"
    for at, plan in ((tmp_path / "elsewhere", "../plans/plan.toml"), (path.parent, "plan.toml"), (tmp_path, str(path))):
        monkeypatch.chdir(at)
        for name in ("sub/config.json", "./sub", "sub", "../plans/sub/config.json", str(path.parent / "sub")):
            path.write_text(f'model = "{name}"\ngpu = "card.toml"\n', encoding="utf-8")
            found = answer("ledger", plan)
            assert (found["model"], found["accelerator"]) == ("sub", "own-card"), (at, name)
    path.write_text('model = "absent/config.json"\n', encoding="utf-8")
    assert str(path.parent / "absent" / "config.json") in run("ledger", str(path)).err


def test_a_preset_is_not_looked_for_among_files(tmp_path: Path) -> None:
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text("not a config", encoding="utf-8")
    path = tmp_path / "plan.toml"
    path.write_text('model = "gpt2"\n', encoding="utf-8")
    assert answer("ledger", str(path))["model"] == "gpt2"


def test_every_key_is_a_flag_and_the_other_way_round() -> None:
    names = PlanRequest.__struct_encode_fields__
    assert [name.replace("-", "_") for name in names] == list(PlanRequest.__struct_fields__)
    assert set(NUMBERS) <= set(names)


def test_a_plan_file_serves_every_verb_that_takes_a_model(plan: Path) -> None:
    assert answer("model", str(plan))["num_layers"] == 16
    assert [row["zero_stage"] for row in answer("states", str(plan))["rows"]] == [0, 1, 2, 3]
    text = EVERY_KEY.replace("dp-shard = 4\ndp = 4\n", "")
    plan.write_text(text, encoding="utf-8")
    assert answer("plan", str(plan))["fixed"]["tp"] == 2


@pytest.mark.parametrize(
    ("line", "code", "holds"),
    [
        ("gpu-s = 1", 1, ("'gpu-s'", "gpus")),
        ("dp_shard = 1", 1, ("'dp_shard'", "dp-shard")),
        ('gpus = "many"', 1, ("gpus is 'many'", "expected `int`, got `str`")),
        ("gpus = 8.5", 1, ("gpus is 8.5", "expected `int`")),
        ('recompute = "some"', 1, ("--recompute some is not", "none, full")),
        ("offload = ['cpu']", 1, ("offload is ['cpu']", "optimizer or parameters")),
        ("pp-layout = [1, 'x']", 1, ("pp-layout is [1, 'x']", "expected `int`")),
        ("offload = 'cpu'", 1, ("plan.toml: offload: 'cpu' is not one of optimizer, parameters, activations, none",)),
        ("pp-layout = '1,x'", 1, ("plan.toml: pp-layout: 'x' is not a whole number",)),
        ("pp-layout = '6,6.5'", 1, ("plan.toml: pp-layout: '6.5' is not a whole number",)),
        ("lora-targets = ''", 1, ("plan.toml: lora-targets: a value is empty",)),
        (f"model = '{'a/' + 'b' * 300}'", 1, ("bbb",)),
        ("gpus = 0", 1, ("--gpus is 0",)),
        (f"gpus = {'9' * 5000}", 1, ("plan.toml: is not valid TOML: ", "4300")),
        ('cluster = "a\\u0000.toml"', 1, ("cluster is 'a\\x00.toml'", "no name has the character zero")),
        ("gpus = 1\ngpus = 2", 1, ("not valid TOML",)),
        ("gpus = ", 1, ("not valid TOML",)),
        ("model = 'other.toml'", 1, ("another PLAN file",)),
        ("gpus = 8\ndp = 3", 2, ("--dp is 3",)),
    ],
)
def test_a_bad_plan_file_says_what_is_wrong(tmp_path: Path, line: str, code: int, holds: tuple[str, ...]) -> None:
    path = tmp_path / "plan.toml"
    model = "" if line.startswith("model") else "model = 'gpt2'\n"
    path.write_text(model + line + "\n", encoding="utf-8")
    done = run("ledger", str(path))
    assert (done.code, done.out) == (code, "")
    for text in holds:
        assert text in done.err


def test_a_plan_file_that_names_no_model_needs_one(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("gpus = 8\n", encoding="utf-8")
    assert "no model" in run("ledger", str(path)).err
    path.write_bytes(b"\xff\xfe")
    assert "UTF-8" in run("ledger", str(path)).err


def test_a_model_by_hand_is_its_config() -> None:
    """Llama 3 8B from its sizes."""
    sizes = ("--hidden=4096", "--layers=32", "--heads=32", "--kv-heads=8", "--ffn=14336", "--vocab=128256")
    for name in ((), ("custom",)):
        assert answer("model", *name, *sizes)["total_params"] == 8_030_261_248


@pytest.mark.parametrize(
    ("text", "count"),
    [("70B", 70 * 10**9), ("70b", 70 * 10**9), ("7.5e9", 7_500_000_000), ("1.3B", 1_300_000_000), ("124M", 124_000_000),
     ("0.5T", 5 * 10**11), ("12", 12), ("gpt2", None), ("70 B", None), ("-7B", None), ("7e", None),
     ("7\u212a", None), ("\u0667", None)],
)  # fmt: skip
def test_parameter_counts(text: str, count: int | None) -> None:
    assert parameter_count(text) == count


@pytest.mark.parametrize(
    ("text", "values"),
    [("gpus=8..4096", tuple(8 << step for step in range(10))), ("gpus=8..100", (8, 16, 32, 64)), ("tp=3..3", (3,)),
     ("mbs=1,2,4", (1, 2, 4)), ("mbs=4,1,4", (4, 1)), ("dp-shard=0,1", (0, 1)), ("mbs=+1,-2", (1, -2))],
)  # fmt: skip
def test_sweep_values(text: str, values: tuple[int, ...]) -> None:
    assert sweep_values(text) == (text.partition("=")[0], values)


def test_a_sweep_has_a_limit() -> None:
    with pytest.raises(UsageError, match="65 values; give at most 64"):
        sweep_values(f"gpus={','.join(map(str, range(1, 66)))}")


def test_a_sweep_is_a_ledger_a_value() -> None:
    arguments = ("ledger", "llama-3-8b", "--zero", "3", "--engine", "pytorch")
    for row in answer(*arguments, "--sweep", "gpus=1..8")["rows"]:
        alone = answer(*arguments, "--gpus", str(row["value"]))
        assert row["total_bytes"] == alone["memory"]["meters"]["allocated"]["estimate"]
        assert row["wire_bytes"] == alone["wire_bytes"]


def test_a_sweep_keeps_the_rows_that_are_refused() -> None:
    rows = answer("ledger", "llama-3-8b", "--gpus", "64", "--sweep", "tp=1,3,64,8")["rows"]
    assert [row["value"] for row in rows] == [1, 3, 64, 8]
    assert (
        [row["total_bytes"] is None for row in rows] == ["refused" in row for row in rows] == [False, True, True, False]
    )


def test_a_plan_differs_from_itself_in_nothing(plan: Path) -> None:
    found = answer("diff", str(plan), str(plan))
    assert found["lines"] == []
    assert found["same"] > 0
    assert {line["delta"] for line in found["totals"]} == {0}


def test_diff_is_the_difference_of_two_ledgers(tmp_path: Path, plan: Path) -> None:
    """A PLAN file and what `ledger --json` wrote of it are the same thing."""
    other = answer("ledger", str(plan), "--zero", "0")
    saved = tmp_path / "other.json"
    saved.write_bytes(msgspec.json.encode(other))
    found = answer("diff", str(plan), str(saved))
    totals = {line["id"]: line for line in found["totals"]}
    ours = answer("ledger", str(plan))
    assert totals["memory, allocated"]["delta"] == (
        other["memory"]["meters"]["allocated"]["estimate"] - ours["memory"]["meters"]["allocated"]["estimate"]
    )
    assert totals["sent per step"]["delta"] == other["wire_bytes"] - ours["wire_bytes"]
    sizes = [abs(line["delta"]) for line in found["lines"]]
    assert sizes == sorted(sizes, reverse=True)
    assert all(line["delta"] == line["b"] - line["a"] != 0 for line in found["lines"])


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"lines": 1}', '{"lines": [], "memory": null}', "\xff"])
def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path, plan: Path, text: str) -> None:
    path = tmp_path / "saved.json"
    path.write_text(text, encoding="latin-1")
    done = run("diff", str(path), str(plan))
    assert done.code == 1
    assert f"{path} is not a ledger" in done.err


def test_every_verb_is_a_service_and_a_report() -> None:
    """The folder is the list: a verb is a file of each, with a Request, a Response and run, and a document."""
    from trainledger.cli.verbs import VERBS

    names = {verb.module for verb in VERBS}
    source = ROOT / "src" / "trainledger"
    assert {path.stem for path in (source / "service").glob("*.py") if "\nclass Response(" in path.read_text()} == names
    # what check says of a plan, and not of a message, has a file of its own
    documents = {path.stem for path in (source / "report").glob("*.py") if "\ndef document(" in path.read_text()}
    assert documents == names | {"checked"}
    for verb in VERBS:
        assert callable(verb.service.run)
        assert callable(verb.report.document)
        assert isinstance(verb.service.Response.exit_code, property)
