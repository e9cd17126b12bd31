"""The run book: what goes in comes out, writers wait, the killed leave it whole, and no other file is touched."""

from __future__ import annotations

import functools
import resource
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest
from sqlite_utils import Database

from command_line import run
from fake_baselines import baseline, drawn, rung, wrapped
from trainledger.account.rank_memory import PEAK
from trainledger.errors import BadInput, UnknownName
from trainledger.records import book as books
from trainledger.records.book import opened, transaction
from trainledger.records.record import Baseline
from trainledger.records.schema import MIGRATIONS
from trainledger.records.store import every, read, write

WRITER = Path(__file__).parent / "book_processes.py"


def anonymous(of: Baseline) -> Baseline:
    return msgspec.structs.replace(of, number=0)


def test_a_record_comes_out_as_it_went_in(tmp_path: Path) -> None:
    import numpy as np

    peaks = msgspec.structs.replace(
        rung(drawn(np.random.default_rng(0), 0, 3), ranks=4), allocator_peak_bytes=(7, 1 << 40)
    )
    made = wrapped("a", baseline("a").rungs[0], peaks)
    with opened(tmp_path / "new" / "book.db", create=True) as db:
        first, second = write(db, made), write(db, baseline("a", seed=1))
        assert (first.number, second.number) == (1, 2)
        assert read(db, "1") == first
        assert read(db, "a") == second
        (brief, _) = every(db, brief=True)
        assert {line.id for rung in brief.rungs for line in rung.lines} == {PEAK}
        for name in ("3", "\u00b2", "9" * 30):
            with pytest.raises(UnknownName):
                read(db, name)
        assert [anonymous(one) for one in every(db)] == [made, baseline("a", seed=1)]
        with pytest.raises(UnknownName, match="nearest: a; "):
            read(db, "aa")


def test_a_record_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "book.db"
    broken = msgspec.structs.replace(baseline().rungs[0], ranks=2, steps=(*baseline().rungs[0].steps,) * 2)
    with opened(path, create=True) as db:
        write(db, baseline())
        with pytest.raises(sqlite3.IntegrityError):
            write(db, wrapped("twice", broken))
        assert [made.name for made in every(db)] == ["here"]
        assert db.table("rung").count == 1


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "book.db"
    with start(path, made("left"), 12) as left, start(path, made("right"), 12) as right:
        said = [[int(line) for line in out_of(writer)] for writer in (left, right)]
        assert (left.wait(30), right.wait(30)) == (0, 0)
    assert sorted(said[0] + said[1]) == list(range(1, 25))
    with opened(path, create=False) as db:
        found = list(every(db))
    assert [anonymous(one) for one in found if one.name == "left"] == [made("left")] * 12
    assert [anonymous(one) for one in found if one.name == "right"] == [made("right")] * 12


def test_a_writer_that_is_killed_leaves_the_book_whole(tmp_path: Path) -> None:
    """Killed at several moments of its work: every record that it said is there, and none is in parts."""
    path = tmp_path / "book.db"
    for moment in range(3):
        with start(path, made("victim"), 1000) as writer:
            lines = iter(out_of(writer).readline, "")
            said = [int(next(lines)) for _ in range(2)]
            time.sleep(0.005 * moment)
            writer.kill()
            said += [int(line) for line in lines if line.endswith("\n")]
        with opened(path, create=False) as db:
            found = list(every(db))
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            assert not db.execute("PRAGMA foreign_key_check").fetchall()
        assert {one.number for one in found} >= set(said)
        assert all(anonymous(one) == made("victim") for one in found)


@functools.cache
def made(name: str) -> Baseline:
    """A record that takes a moment to write."""
    return baseline(name, rounds=20, steps=20)


def start(path: Path, record: Baseline, count: int) -> subprocess.Popen[str]:
    """A writer of its own process."""
    file = path.with_name(f"{record.name}.json")
    file.write_bytes(msgspec.json.encode(record))
    command = [sys.executable, str(WRITER), str(path), str(file), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def out_of(writer: subprocess.Popen[str]) -> IO[str]:
    assert writer.stdout is not None
    return writer.stdout


def test_a_writer_waits_for_another(tmp_path: Path) -> None:
    path = tmp_path / "book.db"
    with opened(path, create=True) as db:
        write(db, baseline())
    with closing(sqlite3.connect(path, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.3, other.rollback)
        timer.start()
        with opened(path, create=True) as db:
            assert write(db, baseline()).number == 2
        timer.join()


def database(path: Path, *statements: str) -> bytes:
    """A database that these statements made, as bytes."""
    with closing(sqlite3.connect(path)) as db:
        for statement in statements:
            db.execute(statement)
        db.commit()
    return path.read_bytes()


def test_a_locked_book_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "book.db"
    with opened(path, create=True) as db:
        write(db, baseline())
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN EXCLUSIVE")
        said = r"book\.db has been locked by another process for 0\.05 s; end that"
        with pytest.raises(BadInput, match=said), opened(path, create=True, busy_s=0.05) as db:
            write(db, baseline())
    with opened(path, create=False) as db:
        assert len(list(every(db))) == 1


REFUSED = {
    "another program's": (("CREATE TABLE mine (x)",), "is a database of another program"),
    "a newer release's": (
        (f"PRAGMA application_id = {books.APPLICATION}", "CREATE TABLE baseline (x)", "PRAGMA user_version = 99"),
        "has tables of version 99, and this release of trainledger knows",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_database_is_refused_and_left_as_it_is(tmp_path: Path, name: str) -> None:
    statements, said = REFUSED[name]
    path = tmp_path / "book.db"
    before = database(path, *statements)
    for command in (("history",), ("run", "gpt2", "--ranks", "1")):
        done = run("baseline", *command, "--book", str(path))
        assert (done.code, done.out) == (1, "")
        assert said in done.err
        assert str(path) in done.err
        assert "--book" in done.err
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["book.db"]


def test_an_empty_file_that_is_read_stays_empty(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.touch()
    done = run("baseline", "history", "--book", str(path))
    assert (done.code, done.out) == (1, "")
    assert f"--book {path} is an empty file and no run book" in done.err
    assert path.read_bytes() == b""


def test_a_damaged_book_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "book.db"
    with opened(path, create=True) as db:
        write(db, baseline(rounds=20, steps=20))
    content = path.read_bytes()
    for spoilt, said in (
        (content[:4096] + bytes(4096) + content[8192:], "is damaged"),
        (content[: len(content) // 2], "is damaged"),
        (b"number,name\n1,a\n", "is not a SQLite file"),
    ):
        path.write_bytes(spoilt)
        done = run("baseline", "history", "--book", str(path))
        assert (done.code, done.out) == (1, "")
        assert said in done.err
        assert path.read_bytes() == spoilt


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nowhere.db", "there is no run book"),
        (".", "is not a file"),
        ("", "--book is empty"),
        ("nowhere.json", "cannot be read"),
    ],
)
def test_what_is_no_book_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("baseline", "history", "--book", given)
    assert (done.code, done.out) == (1, "")
    assert said in done.err
    assert not list(tmp_path.iterdir())


def test_an_older_book_is_brought_up_to_date_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "book.db"
    with opened(path, create=True) as db:
        write(db, baseline())

    def note(db: Database) -> None:
        db.table("baseline").add_column("note", str)

    def fails(db: Database) -> None:
        note(db)
        raise RuntimeError("half way")

    monkeypatch.setattr(books, "MIGRATIONS", (*MIGRATIONS, fails))
    with pytest.raises(RuntimeError), opened(path, create=False):
        pass
    assert columns(path) == (1, False)
    monkeypatch.setattr(books, "MIGRATIONS", (*MIGRATIONS, note))
    with opened(path, create=False) as db:
        assert [made.name for made in every(db)] == ["here"]
    assert columns(path) == (2, True)


def columns(path: Path) -> tuple[int, bool]:
    """(version, whether the new column is there)."""
    with closing(sqlite3.connect(path)) as db:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        return version, "note" in [row[1] for row in db.execute("PRAGMA table_info(baseline)")]


def test_a_transaction_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "book.db", create=True) as db:
        write(db, baseline())
        with suppress(KeyboardInterrupt), transaction(db):
            db.conn.execute("INSERT INTO rank VALUES (1, 2, 3)")
            raise KeyboardInterrupt
        assert db.table("rank").count == 0


def test_readers_see_the_last_whole_book_while_one_writes(tmp_path: Path) -> None:
    path = tmp_path / "book.db"
    with opened(path, create=True) as db:
        write(db, baseline())
        with transaction(db):
            db.conn.execute("DELETE FROM step")
            with opened(path, create=False, busy_s=0.05) as other:
                assert [anonymous(one) for one in every(other)] == [baseline()]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("rungs",), [], "$.baselines[0].rungs"),
        (("rungs", 0, "steps"), [], "$.baselines[0].rungs[0].steps"),
        (("rungs", 0, "steps", 0, "seconds"), 0, "seconds"),
        (("rungs", 0, "steps", 0, "reference_work_s"), -1.0, "reference_work_s"),
        (("rungs", 0, "tokens"), 0, "tokens"),
        (("rungs", 0, "wire_bytes"), 1 << 64, "wire_bytes"),
        (("rungs", 0, "lines", 0, "id"), "held/weights/x", "without a peak"),
        (("scaling",), "sideways", "scaling"),
        (("rungs", 0, "spec"), {}, "does not say its model"),
        (("rungs", 0, "spec"), {"model": [7]}, "does not say its model"),
    ],
)
def test_an_export_that_could_not_be_is_refused(
    tmp_path: Path, path: tuple[str | int, ...], value: object, said: str
) -> None:
    export, record = tmp_path / "spoilt.json", msgspec.to_builtins(baseline())
    at: Any = record
    for key in path[:-1]:
        at[key] = list(at[key]) if isinstance(at[key], tuple) else at[key]
        at = at[key]
    at[path[-1]] = value
    export.write_bytes(msgspec.json.encode({"baselines": [record]}))
    for verb in (("history", "--book", str(export)), ("import", str(export), "--book", str(tmp_path / "book.db"))):
        done = run("baseline", *verb)
        assert (done.code, done.out) == (1, "")
        assert said in done.err
    assert not (tmp_path / "book.db").exists()


def test_an_export_that_finds_no_room_leaves_its_name_free(tmp_path: Path) -> None:
    source, export = Path(__file__).parent.parent / "examples" / "baselines.json", tmp_path / "all.json"
    asked = ("baseline", "export", str(export), "--book", str(source))
    limit = source.stat().st_size // 2
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        done = run(*asked)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (done.code, done.out) == (1, "")
    assert f"{export} cannot be written: File too large; make room, or name another file" in done.err
    assert not export.exists()
    assert run(*asked).code == 0
