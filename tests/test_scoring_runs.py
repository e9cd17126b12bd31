"""Tables of measured runs: what is predicted of each row from its inputs, and how its peak of memory is graded."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger.report import score as report
from trainledger.report.plain import render
from trainledger.scoring import predict_csv, score_csv
from trainledger.scoring.runs import predict_run
from trainledger.scoring.table import MEASURED, load_table, table_kinds

SHIPPED = MEASURED / "runs.csv"
GIB = 1 << 30
OUTCOMES = table_kinds()["runs"].outcomes

# What the accounts answer of the runs that come with the package, by source: a row that is lost shows here.
PREDICTED = {
    "BLM": 52,
    "DSG": 5,
    "DSP": 2,
    "FP8LM": 4,
    "GFT": 3,
    "NTB": 14,
    "SMX": 21,
    "TAO": 6,
    "TAO2": 8,
    "TPR": 1,
    "TT16": 5,
    "TTN": 10,
    "TTN2": 3,
    "TTU": 2,
    "ZBP": 24,
}
INCOMPLETE = {"MMZ": 2, "MPF": 1, "PRM": 8}
UNSUPPORTED = {"CAI": 2, "FP8LM": 2, "TTU": 2}

LLAMA: dict[str, str] = {
    "id": "AB-1",
    "tier": "A",
    "system": "Megatron-LM",
    "source_date": "2026-05",
    "gpu": "H100",
    "gpu_mem_gb": "80",
    "num_gpus": "8",
    "model": "llama3-8b",
    "layers": "4",
    "tp": "2",
    "zero_stage": "1",
    "sequence_parallel": "1",
    "mbs": "1",
    "gbs": "8",
    "seq_len": "4096",
    "precision": "bf16",
    "recompute": "none",
    "meter": "allocated",
    "peak_mem_gib": "40.0",
    "mem_unit_bytes": "2^30",
    "oom": "",
}


@pytest.fixture(scope="module")
def shipped() -> dict[str, Any]:
    """What is predicted of the table that comes with the package."""
    return predict_csv(SHIPPED)


def shipped_rows() -> list[dict[str, str]]:
    with SHIPPED.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    path.write_text(text.getvalue(), encoding="utf-8")
    return path


def scored(folder: Path, *changes: dict[str, str]) -> dict[str, Any]:
    rows = [{**LLAMA, "id": f"AB-{number}", **change} for number, change in enumerate(changes)]
    return score_csv(write(folder / "t.csv", rows), "memory")


def predicted_bytes(row: dict[str, str], meter: str = "allocated") -> int:
    said = predict_run({name: value for name, value in row.items() if name not in OUTCOMES})
    assert said.memory is not None, said.reason
    return said.memory.meters[meter].estimate


def test_every_shipped_row_is_predicted_or_says_why_not(shipped: dict[str, Any]) -> None:
    counts: dict[str, Counter[str]] = {}
    for row in shipped["rows"]:
        counts.setdefault(row["status"], Counter())[row["id"].partition("-")[0]] += 1
        assert row["reason"]
        assert (row["status"] == "predicted") == ("memory_bytes" in row)
    assert dict(counts["predicted"]) == PREDICTED
    assert dict(counts["incomplete"]) == INCOMPLETE
    assert dict(counts["unsupported"]) == UNSUPPORTED


def test_a_prediction_has_its_meters_and_says_what_it_took_for_granted(tmp_path: Path) -> None:
    row = {**LLAMA, "sequence_parallel": "", "gbs": "", "zero_stage": "", "shard_note": "distributed optimizer"}
    said = predict_csv(write(tmp_path / "t.csv", [row]))["rows"][0]
    assert said["status"] == "predicted"
    for bounds in said["memory_bytes"].values():
        assert 0 < bounds["lower"] <= bounds["estimate"] <= bounds["upper"]
    assert (said["profile"], said["pp_stage"]) == ("megatron", 0)
    assert said["usable_bytes"] > 79 * GIB
    assert [text.partition(":")[0] for text in said["assumed"]] == ["gbs is blank", "sequence_parallel is blank"]


def changed(rows: list[dict[str, str]], how: str) -> list[dict[str, str]]:
    """The rows with every outcome blanked and shuffled in turn, full of garbage, or gone."""
    outcomes = [column for column in OUTCOMES if column in rows[0]]
    assert {"peak_mem_gib", "oom", "notes", "mem_kind", "inputs_from"} <= set(outcomes)
    for column in outcomes:
        values = [row[column] for row in rows]
        values = values[len(column) * 7 :] + values[: len(column) * 7]
        for index, (row, value) in enumerate(zip(rows, values, strict=True)):
            if how == "drop":
                del row[column]
            else:
                blank = how == "blank and shuffle" and (index + len(column)) % 2
                row[column] = '7", \n' if how == "garbage" else "" if blank else value
    return rows


@pytest.mark.parametrize(("how", "every"), [("blank and shuffle", 1), ("garbage", 11), ("drop", 11)])
def test_the_predictor_cannot_see_an_outcome(tmp_path: Path, shipped: dict[str, Any], how: str, every: int) -> None:
    said = predict_csv(write(tmp_path / "changed.csv", changed(shipped_rows(), how)[::every]))
    assert json.dumps(said) == json.dumps({**shipped, "rows": shipped["rows"][::every]})


def test_an_id_and_a_source_decide_nothing(tmp_path: Path, shipped: dict[str, Any]) -> None:
    rows = shipped_rows()[::9]
    renamed = [{**row, "id": f"X-{n}", "source": "", "source_url": "", "tier": ""} for n, row in enumerate(rows)]
    after = predict_csv(write(tmp_path / "t.csv", renamed))["rows"]
    assert [{**row, "id": ""} for row in after] == [{**row, "id": ""} for row in shipped["rows"][::9]]


def test_what_stands_in_notes_alone_has_a_column_and_its_quotation() -> None:
    rows = {row["id"]: row for row in shipped_rows()}
    assert all(row["source_license"] and row["source_url"] for row in rows.values())
    assert all(row["peak_mem_gib"] or row["oom"] for row in rows.values())
    moved = [row for row in rows.values() if row["cp_comm"] or row["pp_microbatches"] or row["power"]]
    assert len(moved) == 9
    for row in moved:
        assert row["inputs_from"]
    quotation = re.compile(r'(?:notes|source), "([^"]*)"')
    quoted = {row["id"]: quotation.findall(row["inputs_from"]) for row in rows.values()}
    assert sum(map(len, quoted.values())) == 25
    for name, words in quoted.items():
        assert all(word in f"{rows[name]['notes']} {rows[name]['source']}" for word in words), name


def test_a_peak_is_compared_in_bytes(tmp_path: Path) -> None:
    expected = predicted_bytes(LLAMA)
    units = {"": GIB, "2^30": GIB, "2^30 (assumed)": GIB, "1e9": 10**9}
    rows = scored(tmp_path, *({"mem_unit_bytes": unit} for unit in units))["rows"]
    for row, unit in zip(rows, units.values(), strict=True):
        assert (row["status"], row["measured"], row["predicted"]) == ("scored", 40 * unit, expected)
        assert row["log_ratio"] == pytest.approx(math.log(expected / (40 * unit)))
    unread = scored(tmp_path, {"mem_unit_bytes": "furlongs"}, {"peak_mem_gib": "much"}, {"peak_mem_gib": ""})["rows"]
    assert [row["status"] for row in unread] == ["unmeasured"] * 3


def test_each_meter_is_graded_by_its_own(tmp_path: Path) -> None:
    allocated, device, unknown = scored(tmp_path, {}, {"meter": "device"}, {"meter": "unknown"})["rows"]
    assert allocated["predicted"] == predicted_bytes(LLAMA)
    assert device["predicted"] == predicted_bytes(LLAMA, "device")
    assert allocated["predicted"] < device["predicted"]
    assert unknown["log_ratio"] is not None


def test_rows_of_tier_c_and_of_no_meter_are_apart(tmp_path: Path) -> None:
    exact = str(predicted_bytes(LLAMA) / GIB)
    far = {"peak_mem_gib": "1", "mem_unit_bytes": "2^30"}
    answer = scored(tmp_path, {"peak_mem_gib": exact}, {**far, "tier": "C"}, {**far, "meter": "unknown"})
    overall, source = answer["overall"], answer["sources"]["AB"]
    for part in (overall, source):
        assert part["scored_rows"] == 1
        assert part["median_abs_log_ratio"] == pytest.approx(0, abs=1e-9)
        assert part["tier_c"]["median_abs_log_ratio"] > 1
        assert part["unknown_meter"]["median_abs_log_ratio"] > 1
    assert source["meters"]["allocated"]["scored_rows"] == 2
    assert source["scored"] == 3


def test_a_value_that_is_measured_once_and_printed_often_counts_once(tmp_path: Path) -> None:
    peaks = ["10", "10", "10", "20"]
    summary = scored(tmp_path, *({"peak_mem_gib": peak} for peak in peaks))["sources"]["AB"]
    near, distant = sorted(abs(math.log(predicted_bytes(LLAMA) / (int(peak) * GIB))) for peak in ("10", "20"))
    assert summary["distinct"]["values"] == 2
    assert summary["distinct"]["median_abs_log_ratio"] == pytest.approx((near + distant) / 2)
    assert summary["median_abs_log_ratio"] in (pytest.approx(near), pytest.approx(distant))


def test_no_source_dominates_the_mean(tmp_path: Path) -> None:
    far = [{"id": f"CD-{n}", "peak_mem_gib": str(predicted_bytes(LLAMA) / GIB / math.e)} for n in range(5)]
    exact = {"id": "EF-0", "peak_mem_gib": str(predicted_bytes(LLAMA) / GIB)}
    overall = scored(tmp_path, *far, exact)["overall"]
    assert overall["median_abs_log_ratio"] == pytest.approx(0.5)
    assert (overall["scored_sources"], overall["scored_rows"]) == (2, 6)


def test_running_out_of_memory_is_a_match_where_the_card_is_too_small(tmp_path: Path) -> None:
    out = {"oom": "1", "peak_mem_gib": ""}
    large = {"seq_len": "262144"}
    unknown = {"gpu": "a card of mine", "gpu_mem_gb": "80"}
    answer = scored(tmp_path, {**out, **large}, out, {**out, **unknown}, {**out, **unknown, "gpu_mem_gb": ""})
    assert [row["status"] for row in answer["rows"]] == ["match", "mismatch", "mismatch", "incomplete"]
    assert answer["rows"][0]["log_ratio"] is None
    assert "ran out of memory, but" in answer["rows"][1]["reason"]
    assert answer["overall"]["out_of_memory"] == {"rows": 3, "match": 1}
    assert answer["overall"]["mismatch_ids"] == ["AB-1", "AB-2"]


def test_a_run_has_no_states_and_a_printed_figure_no_peak(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", [LLAMA])
    row = score_csv(path, "states")["rows"][0]
    assert (row["status"], row["predicted"]) == ("unsupported", None)
    assert "never its states alone" in row["reason"]
    figures = tmp_path / "f.csv"
    figures.write_text(
        "id,source,kind,zero_stage,precision,unit,value_published\n"
        "A,ZeRO paper,bytes per parameter,0,fp16,bytes/param,16\n"
    )
    assert score_csv(figures, "memory")["rows"][0]["status"] == "unsupported"


def test_the_screen_shows_every_source_and_what_is_furthest_off(tmp_path: Path) -> None:
    by_source = {row["id"].partition("-")[0]: row for row in shipped_rows()}
    answer = score_csv(write(tmp_path / "t.csv", list(by_source.values())), "memory")
    text = render(report.document(answer))
    for name in by_source:
        assert name in text
    furthest = max((row for row in answer["rows"] if row["log_ratio"] is not None), key=lambda r: abs(r["log_ratio"]))
    assert furthest["id"] in text


WORDS = st.sampled_from(
    [
        "",
        "1",
        "0",
        "8",
        "-3",
        "1e12",
        "2.5",
        "bf16",
        "full",
        "selective",
        "torchtitan",
        "Megatron-LM",
        "fsdp",
        "x",
        "\u00e9",
    ]
)


@given(st.dictionaries(st.sampled_from(table_kinds()["runs"].inputs), WORDS, max_size=40))
def test_whatever_stands_in_a_row_it_is_answered(inputs: dict[str, str]) -> None:
    said = predict_run(inputs)
    assert (said.memory is None) == (said.status != "predicted")
    assert said.reason


@given(st.sampled_from(sorted(LLAMA)), WORDS)
def test_a_complete_row_with_one_cell_changed_is_answered(column: str, word: str) -> None:
    said = predict_run({**LLAMA, column: word})
    assert said.reason
    assert said.memory is None or all(bounds.estimate > 0 for bounds in said.memory.meters.values())


def test_a_table_of_runs_is_read_without_its_outcomes() -> None:
    for row in load_table(SHIPPED).rows:
        assert not set(OUTCOMES) & set(row.inputs)
