"""`baseline run` and its kin: the rungs of a ladder, what is kept of them, and the answers of the command line."""

from __future__ import annotations

import csv
import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from command_line import check_golden, run
from fake_baselines import FakeClock
from fake_runs import Fake, Spoil, doubled_call
from test_cli_answers import shape
from trainledger.errors import BadInput, TrainledgerError, UsageError
from trainledger.records import book as books
from trainledger.runtime import faults
from trainledger.runtime.observe.observation import Observation
from trainledger.runtime.spec import RunSpec
from trainledger.service import baseline_compare, baseline_run
from trainledger.service.baseline_ladder import ladder, ranks_of
from trainledger.service.baseline_request import LadderRequest

ZERO = ("gpt2", "--shrink", "--zero", "3", "--ranks", "1,2,4")


def faked(monkeypatch: pytest.MonkeyPatch, spoil: Spoil | None = None) -> FakeClock:
    """The command line over runs that did not happen."""
    clock = FakeClock()
    monkeypatch.setattr(baseline_run, "launch", Fake(spoil, alive=True))
    monkeypatch.setattr(baseline_run, "on_the_clock", clock)
    monkeypatch.setattr(baseline_compare, "on_the_clock", clock)
    return clock


def rungs(**given: Any) -> list[tuple[int, int, int, int]]:  # noqa: ANN401 - fields of several types
    """(ranks, gbs, micro-batches, dp_shard) of each rung."""
    found: list[tuple[int, int, int, int]] = []
    for plan in ladder(LadderRequest(**given)):
        row = plan.spec.plan
        gbs = row["mbs"] * row["num_microbatches"] * row["dp_replicate"] * row["dp_shard"]
        found.append((ranks_of(plan), gbs, row["num_microbatches"], row["dp_shard"]))
    return found


def test_a_ladder_grows_in_data_parallelism() -> None:
    assert rungs(model="gpt2") == [(1, 2, 2, 1), (2, 4, 2, 2), (4, 8, 2, 4), (8, 16, 2, 8)]
    assert rungs(model="llama-3-8b", tp=2, gbs=3) == [(2, 3, 3, 1), (4, 6, 3, 2), (8, 12, 3, 4)]
    assert rungs(model="llama-3-8b", tp=4, pp=4) == [(16, 8, 8, 1)]
    assert rungs(model="gpt2", ranks=(4, 2), dp_replicate=2, zero=3) == [(2, 4, 2, 1), (4, 8, 2, 2)]
    assert rungs(model="gpt2", dp=3) == [(3, 6, 2, 3)]


def test_strong_scaling_keeps_the_batch() -> None:
    strong = {"model": "gpt2", "scaling": "strong"}
    assert rungs(**strong, ranks=(1, 2, 3)) == [(1, 6, 6, 1), (2, 6, 3, 2), (3, 6, 2, 3)]
    assert rungs(**strong, ranks=(1, 4), shrink=True) == [(1, 8, 8, 1), (4, 8, 2, 4)]
    assert rungs(**strong, ranks=(1, 2), gbs=4) == [(1, 4, 4, 1), (2, 4, 2, 2)]


def test_the_model_is_made_small_once() -> None:
    """By the most ranks alone: experts are as many as they need, and a rung of fewer has no smaller model."""
    plans = ladder(LadderRequest(model="mixtral-8x7b", ep=2, zero=3, ranks=(2, 8), shrink=True))
    assert len({msgspec.json.encode(plan.spec.model) for plan in plans}) == 1
    assert {plan.shrunken is not None for plan in plans} == {True}


@pytest.mark.parametrize(
    ("error", "given", "said"),
    [
        (UsageError, {"ranks": (2,), "gpus": 2}, "--ranks says how many ranks there are, and so does --gpus"),
        (UsageError, {"ranks": (2, 3), "tp": 2}, "--ranks 3 is not a multiple of tp 2 = 2"),
        (UsageError, {"ranks": (1, 2, 1)}, "--ranks names 1 more than once"),
        (UsageError, {"ranks": (2, 3), "gbs": 3}, "--gbs 3 at 2 ranks is no whole number at 3"),
        (BadInput, {"ranks": (0,)}, "--ranks is 0"),
        (BadInput, {"rounds": 0}, "--rounds is 0"),
        (BadInput, {"steps": 0}, "--steps is 0"),
        (TrainledgerError, {"ranks": (1, 128)}, "at most 64 ranks are forked"),
        (TrainledgerError, {"precision": "fp4"}, "precision"),
    ],
)
def test_what_is_no_ladder_is_refused(error: type[Exception], given: dict[str, Any], said: str) -> None:
    with pytest.raises(error, match=said):
        ladder(LadderRequest(model="gpt2", **given))


def test_a_ladder_is_kept_with_every_step_and_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock, book = faked(monkeypatch), str(tmp_path / "book.db")
    done = run("baseline", "run", *ZERO, "--rounds", "3", "--steps", "4", "--book", book, "--json")
    found = done.json()
    assert (done.code, found["verdict"], found["number"], found["name"]) == (0, "proven", 1, "gpt2")
    ranks = [len(how.ranks) for _, how in clock.told]
    assert ranks == [1, 2, 4, 4, 2, 1, 1, 2, 4]
    for rung in found["rungs"]:
        traffic, memory = rung["traffic"], rung["memory"]
        assert (traffic["calls"], traffic["bytes"]) == (traffic["predicted_calls"], traffic["predicted_bytes"])
        assert memory["peak_bytes"] == memory["predicted_bytes"] > 0
        assert memory["lines"] > 50
    assert [rung["traffic"]["calls"] > 0 for rung in found["rungs"]] == [False, True, True]
    out = str(tmp_path / "steps.csv")
    assert run("baseline", "export", out, "--book", book).code == 0
    with Path(out).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 3 * 4
    assert {(row["ranks"], row["tokens"]) for row in rows} == {("1", "64"), ("2", "128"), ("4", "256")}


def test_what_differs_from_its_ledger_ends_with_4_and_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    faked(monkeypatch, doubled_call_of_many)
    book = str(tmp_path / "book.db")
    done = run("baseline", "run", *ZERO, "--rounds", "1", "--steps", "1", "--book", book)
    assert (done.code, done.err) == (4, "")
    assert done.out.splitlines()[-1].startswith("differs: ")
    (record,) = run("baseline", "history", "--book", book, "--json").json()["records"]
    assert [rung["proven"] for rung in record["rungs"]] == [True, False, False]


def doubled_call_of_many(seen: Observation) -> Observation:
    """A rank that sends issues its first collective twice as often."""
    return doubled_call(seen) if seen.calls else seen


def test_the_keys_of_the_answers_are_frozen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    faked(monkeypatch)
    book, out = ("--book", str(tmp_path / "book.db")), str(tmp_path / "out.json")
    answers = {
        "run": run("baseline", "run", *ZERO, "--rounds", "8", "--steps", "2", *book, "--json"),
        "other": run("baseline", "run", *ZERO, "--rounds", "8", "--steps", "2", "--mbs", "2", *book, "--json"),
        "compare": run("baseline", "compare", "1", "2", *book, "--json"),
        "history": run("baseline", "history", *book, "--json"),
        "export": run("baseline", "export", out, *book, "--json"),
        "import": run("baseline", "import", out, "--book", str(tmp_path / "other.db"), "--json"),
    }
    shapes = {name: shape(done.json()) for name, done in answers.items()}
    check_golden("baseline_keys.json", json.dumps(shapes, indent=1) + "\n")
    for text in (("history",), ("compare", "1", "2"), ("history", "gpt2")):
        done = run("baseline", *text, *book)
        assert done.out
        assert done.err == ""


def test_an_export_is_read_as_a_book_and_put_into_one_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    faked(monkeypatch)
    book, out = str(tmp_path / "book.db"), str(tmp_path / "out.json")
    run("baseline", "run", *ZERO, "--rounds", "1", "--steps", "2", "--book", book)
    run("baseline", "export", out, "--book", book)
    assert run("baseline", "export", out, "--book", book).code == 1
    listed = [run("baseline", "history", "--book", one, "--json").json()["records"] for one in (book, out)]
    assert listed[0] == listed[1]
    other = str(tmp_path / "other.db")
    for records, known in ((1, 0), (0, 1)):
        found = run("baseline", "import", out, "--book", other, "--json").json()
        assert (len(found["records"]), found["known"]) == (records, known)
    refused = run("baseline", "run", *ZERO, "--book", out)
    assert (refused.code, "is only read" in refused.err) == (1, True)
    assert "is no export" in run("baseline", "import", __file__, "--book", other).err
    assert run("baseline", "export", str(tmp_path / "out.txt"), "--book", book).code == 2


def test_a_book_that_is_locked_at_the_end_loses_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What hours have measured goes beside the book, and comes into it by `import`."""
    clock, book = faked(monkeypatch), tmp_path / "book.db"
    monkeypatch.setattr(books, "BUSY_S", 0.05)
    with closing(sqlite3.connect(book, check_same_thread=False)) as other:

        def locked(*given: Any) -> Any:  # noqa: ANN401 - what a clock takes and gives
            if not other.in_transaction:
                other.execute("BEGIN EXCLUSIVE")
            return clock(*given)

        monkeypatch.setattr(baseline_run, "on_the_clock", locked)
        done = run("baseline", "run", *ZERO, "--rounds", "1", "--steps", "2", "--book", str(book))
    assert (done.code, done.out) == (1, "")
    assert "has been locked by another process" in done.err
    (beside,) = tmp_path.glob("*.json")
    assert f"`trainledger baseline import {beside}`" in done.err
    assert len(run("baseline", "import", str(beside), "--book", str(book), "--json").json()["records"]) == 1
    assert run("baseline", "history", "gpt2", "--book", str(book)).code == 0


@pytest.mark.parametrize("name", ["1", "-x", "a b", "x" * 65, ""])
def test_a_name_is_a_word_that_no_number_is(tmp_path: Path, name: str) -> None:
    done = run("baseline", "run", *ZERO, "--name", name, "--book", str(tmp_path / "book.db"))
    assert done.code in (1, 2)
    assert not list(tmp_path.iterdir())


def test_more_ranks_than_memory_are_refused_before_any_starts(tmp_path: Path) -> None:
    book = str(tmp_path / "book.db")
    done = run("baseline", "run", "llama-3.1-405b", "--seq", "64", "--ranks", "1,2", "--book", book)
    assert (done.code, done.out) == (1, "")
    assert "[runtime-host-memory]" in done.err
    assert "or --shrink, which makes the model small first" in done.err


def test_the_default_book_is_in_the_users_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert f"{tmp_path}/trainledger/trainledger.db" in run("baseline", "history").err


def test_verbs_of_two_words_are_found_and_missed_by_name() -> None:
    assert "run, compare, history, export, import" in run("baseline").err
    assert 'Did you mean "compare"' in run("baseline", "compar").err
    assert "baseline compare" in run("baseline", "--help").out
    assert "--least-change" in run("baseline", "compare", "--help").out


def test_a_planted_slow_step_is_a_fifth_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def passed(seconds: float) -> float:
        now[0] += seconds
        return now[0]

    def step(index: int) -> int:
        passed(0.5)
        return index

    monkeypatch.setattr(faults, "time", SimpleNamespace(perf_counter=lambda: passed(1e-4)))
    program = SimpleNamespace(step=step)
    faults.slow_step(cast("Any", program))
    assert program.step(7) == 7
    assert now[0] == pytest.approx(0.6, abs=0.001)


def test_a_layout_is_measured_for_real(tmp_path: Path) -> None:
    """Two forked ranks: lines are as predicted, and each step has its time and that of the reference."""
    started, book = time.perf_counter(), tmp_path / "book.db"
    request = baseline_run.Request(
        model="gpt2", shrink=True, zero=3, ranks=(2,), rounds=1, steps=3, book=str(book), name="real"
    )
    found = baseline_run.run(request)
    assert found.verdict == "proven"
    assert [one.traffic.bytes == one.traffic.predicted_bytes > 0 for one in found.rungs] == [True]
    from trainledger.records.store import read

    with books.opened(book, create=False) as db:
        made = read(db, "real")
    for rung in made.rungs:
        assert len(rung.steps) == 3
        assert all(0 < step.seconds < time.perf_counter() - started for step in rung.steps)
        assert all(step.reference_work_s > 0 for step in rung.steps)
        assert all(step.reference_sum_s > 0 for step in rung.steps)
        assert msgspec.convert(rung.spec, RunSpec).plan["dp_shard"] == rung.ranks
