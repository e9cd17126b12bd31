"""The JSON answers: their keys are an interface, and their figures are those of the ZeRO paper."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from command_line import answer, check_golden, run

LLAMA_70B = 70_553_706_496
ONE_LINE = "held/weights/weights"


def shape(value: object) -> object:
    """The keys of an answer, nested; of a list only its first item, of a figure only whether there is one."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    return [shape(value[0])] if isinstance(value, list) and value and isinstance(value[0], dict) else ""


COMMANDS = {
    "model": ("model", "mixtral-8x7b"),
    "states": ("states", "llama-3-70b", "--gpus", "64", "--gpu", "h100"),
    "ledger": ("ledger", "llama-3-70b", "--gpus", "64", "--tp", "8", "--zero", "3", "--cluster", "dgx-h100"),
    "ledger --explain": ("ledger", "llama-3-8b", "--explain", ONE_LINE),
    "ledger --sweep": ("ledger", "llama-3-8b", "--sweep", "mbs=1,2"),
    "plan": ("plan", "llama-3-8b", "--gpus", "8", "--gpu", "h100", "--top", "1"),
    "diff": ("diff", "examples/llama-3-70b-64xh100.toml", "examples/llama-3-70b-64xh100-pp.toml"),
    "list models": ("list", "models"),
    "list clusters": ("list", "clusters"),
    "list accelerators": ("list", "accelerators"),
    "list engines": ("list", "engines"),
    "list optimizers": ("list", "optimizers"),
    "list precisions": ("list", "precisions"),
    "list rules": ("list", "rules"),
    "list accelerator h100": ("list", "accelerator", "h100"),
}


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent.parent)


def test_the_keys_of_every_answer_are_frozen() -> None:
    answers = {name: answer(*command) for name, command in COMMANDS.items()}
    # What is keyed by name (rules, degrees that were fixed, defaults) is data, not interface.
    for found in answers.values():
        for key in ("rejected", "fixed", "assumed", "fewest_gpus"):
            if key in found:
                found[key] = None
    shapes = {name: shape(found) for name, found in answers.items()}
    check_golden("json_keys.json", json.dumps(shapes, indent=1) + "\n")


def test_states_are_those_of_the_paper() -> None:
    """ZeRO paper, section 3.1: 2 + 2 + 12 bytes a parameter with Adam, each divided from its own stage on."""
    rows = answer("states", "llama-3-70b", "--gpus", "64")["rows"]
    assert [row["zero_stage"] for row in rows] == [0, 1, 2, 3]
    assert [row["weights_bytes"] for row in rows] == [2 * LLAMA_70B] * 3 + [2 * LLAMA_70B // 64]
    assert [row["gradients_bytes"] for row in rows] == [2 * LLAMA_70B] * 2 + [2 * LLAMA_70B // 64] * 2
    assert [row["optimizer_bytes"] for row in rows] == [12 * LLAMA_70B] + [12 * LLAMA_70B // 64] * 3
    assert [row["share_of_full"] for row in rows] == [1, 4 / 16 + 12 / 16 / 64, 2 / 16 + 14 / 16 / 64, 1 / 64]
    assert [row["traffic_vs_ddp"] for row in rows] == [1, 1, 1, 1.5]
    assert rows[0]["wire_bytes"] == round(2 * 63 / 64 * 2 * LLAMA_70B)


def test_a_total_is_the_sum_in_the_papers_accounting() -> None:
    parts = ("weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "buffers_bytes")
    for row in answer("states", "llama-3-70b", "--gpus", "64")["rows"]:
        assert row["total_bytes"] == sum(row[part] for part in parts)


def test_a_parameter_count_answers_for_the_states_alone() -> None:
    """ZeRO paper, figure 1: 7.5 B parameters on 64 GPUs take 120, 31.4, 16.6 and 1.9 GB."""
    found = answer("states", "7.5e9", "--gpus", "64")
    assert [f"{row['total_bytes'] / 1e9:.3g}" for row in found["rows"]] == ["120", "31.4", "16.6", "1.88"]
    assert [row["activations_bytes"] for row in found["rows"]] == [None] * 4
    assert [note["rule"] for note in found["notes"]][:1] == ["states-alone"]


def test_a_model_with_layers_that_have_no_account_answers_for_its_states_alone(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_next", "num_hidden_layers": 4, "num_experts": 16}
    path = tmp_path / "next.json"
    path.write_text(json.dumps(config))
    found = answer("states", str(path), "--gpus", "8", "--gpu", "h100")
    params = answer("model", str(path))["total_params"]
    assert [row["activations_bytes"] for row in found["rows"]] == [None] * 4
    assert found["rows"][0]["total_bytes"] == 16 * params
    assert found["notes"][0]["rule"] == "states-alone"
    assert "next has gated delta networks" in found["notes"][0]["message"]
    plan = answer("plan", str(path), "--gpus", "8", "--gpu", "h100", "--engine", "megatron", "--gbs", "64")
    assert {one["activations_bytes"] for one in plan["plans"]} == {None}
    assert {one["plan"]["tp"] for one in plan["plans"]} == {1}
    assert {one["plan"]["ep"] for one in plan["plans"]} > {1}
    ledger = answer("ledger", str(path), "--gpus", "8", "--gpu", "h100", "--engine", "megatron", "--ep", "4")
    assert "reserved" not in ledger["memory"]["meters"]
    card = ("--gpus", "8", "--gpu", "h100", "--engine", "megatron")
    first = {"states": (), "ledger": ("--ep", "4"), "plan": ("--gbs", "64")}
    said = {verb: run(verb, str(path), *card, *more).out.splitlines()[0] for verb, more in first.items()}
    assert said["states"].startswith("the states alone, without activations, fit H100-SXM5-80GB")
    assert said["ledger"].startswith("the states alone fit, ")
    assert said["plan"].startswith("the states alone of ")
    assert all("bounds" not in line for line in said.values())
    assert not [line for line in ledger["lines"] if "activations" in line["id"]]


def test_a_search_says_how_stages_are_searched_over_which_layers_do_not_divide() -> None:
    flags = ("--gpus", "16", "--gpu", "h100", "--engine", "megatron", "--gbs", "64", "--set")

    def said(layers: int, *more: str) -> list[str]:
        found = answer("plan", "llama-3.2-1b", *flags, f"num_hidden_layers={layers}", *more)
        return [note["message"] for note in found["notes"] if note["rule"] == "uneven-stages"]

    (text,) = said(30)
    assert "30 layers do not divide over 4, 8 or 16 pipeline stages" in text
    assert "--pp 8 --pp-layout 3,4,4,4,4,4,4,3" in text
    assert said(32) == said(30, "--pp", "2") == []
    assert said(30, "--pp", "8", "--pp-layout", "3,4,4,4,4,4,4,3") == []


def test_nothing_fits_or_is_sent_without_a_card_or_a_second_rank() -> None:
    found = answer("states", "llama-3-8b")
    assert found["gpus"] == 1
    assert found["usable_bytes"] is found["fewest_gpus"] is None
    assert {(row["fits"], row["wire_bytes"], row["traffic_vs_ddp"]) for row in found["rows"]} == {(None, 0, None)}


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (0, ("states", "llama-3-70b", "--gpus", "64", "--gpu", "h100")),
        (3, ("states", "llama-3-70b", "--gpus", "8", "--gpu", "h100")),
        (0, ("states", "llama-3-70b", "--gpus", "8")),
        (0, ("ledger", "llama-3-8b", "--gpus", "8", "--zero", "3", "--gpu", "h100")),
        (3, ("ledger", "llama-3-8b", "--gpus", "8", "--zero", "0", "--gpu", "h100")),
        (0, ("ledger", "llama-3-8b", "--gpus", "8", "--zero", "0")),
        (0, ("ledger", "llama-3-8b", "--zero", "3", "--gpu", "h100", "--sweep", "gpus=1..8")),
        (3, ("ledger", "llama-3-8b", "--zero", "0", "--gpu", "h100", "--sweep", "gpus=1..8")),
        (0, ("plan", "llama-3-8b", "--gpus", "8", "--gpu", "h100")),
        (3, ("plan", "llama-3.1-405b", "--gpus", "2", "--gpu", "rtx-4090")),
    ],
)
def test_exit_codes(code: int, arguments: tuple[str, ...]) -> None:
    """0: it fits, or nobody asked; 3: it does not. The same with and without --json."""
    assert run(*arguments).code == code
    answer(*arguments, code=code)


def test_a_plan_that_does_not_fit_names_the_smallest_change() -> None:
    found = answer("plan", "llama-3-70b", "--gpus", "8", "--gpu", "h100", "--engine", "megatron", code=3)
    assert found["plans"] == found["pareto"] == []
    assert found["evaluated"] == sum(found["rejected"].values())
    change = found["smallest_change"]
    alone = answer("ledger", "llama-3-70b", "--gpu", "h100", "--engine", "megatron", *flags_of(change))
    assert alone["memory"]["meters"]["allocated"]["estimate"] == change["total_bytes"] <= found["usable_bytes"]


def flags_of(one: dict[str, Any]) -> list[str]:
    """The flags of a plan that a search answers with."""
    degrees = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp_replicate", "dp_shard", "mbs")
    plan = one["plan"]
    flags = [part for name in degrees for part in (f"--{name.replace('_', '-')}", str(plan[name]))]
    gbs = plan["num_microbatches"] * plan["mbs"] * plan["dp_replicate"] * plan["dp_shard"]
    chosen = ["--zero", str(plan["zero_stage"]), "--gbs", str(gbs), "--recompute", one["recompute"]]
    return [*flags, *chosen, "--sp" if plan["sp"] else "--no-sp"]


def test_what_may_differ_between_two_runs_comes_last() -> None:
    first, second = (answer("plan", "llama-3-8b", "--gpus", "8", "--gpu", "h100") for _ in range(2))
    assert list(first)[-1] == "run"
    assert first.pop("run").keys() == second.pop("run").keys()
    assert first == second


def test_every_plan_offered_fits_and_has_the_gpus_asked_for() -> None:
    found = answer("plan", "mixtral-8x7b", "--gpus", "16", "--cluster", "dgx-h100", "--top", "50", "--pp", "2")
    assert found["evaluated"] == found["accepted"] + sum(found["rejected"].values())
    for one in [*found["plans"], *found["pareto"]]:
        plan = one["plan"]
        assert plan["tp"] * plan["pp"] * plan["cp"] * plan["dp_replicate"] * plan["dp_shard"] == 16
        assert plan["pp"] == 2
        assert one["headroom_bytes"] == found["usable_bytes"] - one["total_bytes"] >= 0


def test_a_plan_offered_is_the_ledger_of_that_plan() -> None:
    """The search and the ledger are one account."""
    one = answer("plan", "llama-3-8b", "--gpus", "16", "--gpu", "h100", "--engine", "pytorch")["plans"][0]
    alone = answer("ledger", "llama-3-8b", "--engine", "pytorch", *flags_of(one))
    assert alone["memory"]["meters"]["allocated"]["estimate"] == one["total_bytes"]
    assert alone["memory"]["pp_stage"] == one["pp_stage"]
    assert alone["wire_bytes"] == pytest.approx(one["wire_bytes"], rel=1e-6)


def test_a_table_is_predicted_and_graded_row_by_row_and_none_is_dropped() -> None:
    table = "tests/data/exact_memory.csv"
    with Path(table).open(encoding="utf-8", newline="") as file:
        ids = [row["id"] for row in csv.DictReader(file)]
    predicted, graded = answer("predict", table), answer("score", table, "--what", "states")
    assert [row["id"] for row in predicted["rows"]] == [row["id"] for row in graded["rows"]] == ids
    assert sum(source["rows"] for source in graded["sources"].values()) == graded["overall"]["rows"] == len(ids)
    text = run("score", table).out
    for count in (graded["overall"]["scored"], graded["overall"]["unsupported"], len(ids)):
        assert str(count) in text
    assert all(name in text for name in graded["sources"])
    assert run("predict", table).out.startswith(f"{len(ids)} rows: ")
