"""Forked ranks: their results in order, and nothing left behind, however a world ends."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

import launch_targets as targets
from trainledger.runtime.launch.failure import died
from trainledger.runtime.launch.fork import RankFailed, run_forked
from trainledger.runtime.launch.rank import ORPHANED, Seat, serve

SHORT = tempfile.gettempdir()
"""Where temporary files are before any test says otherwise."""


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After every test here no rank runs and no file of a world is left."""
    run_forked(1, targets.environment)
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert ranks_running() == []
    assert list(folder.iterdir()) == []


def server_pid() -> int:
    pid = forkserver._forkserver._forkserver_pid  # pyright: ignore[reportAttributeAccessIssue]  # no public name
    assert isinstance(pid, int)
    return pid


def ranks_running() -> list[int]:
    """Children of this process's server, dead ones that it has not noticed yet left out."""
    server = server_pid()
    found: list[int] = []
    for process in Path("/proc").iterdir():
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split() if process.name.isdigit() else []
        except OSError:
            continue
        if fields and int(fields[1]) == server and fields[0] != "Z":
            found.append(int(process.name))
    return found


def test_results_come_in_rank_order_from_ranks_that_met() -> None:
    assert run_forked(4, targets.total, 10) == [(rank, 46.0, 1) for rank in range(4)]


def test_a_rank_knows_its_place() -> None:
    assert run_forked(2, targets.environment) == [["0", "2", "0", "1"], ["1", "2", "1", "1"]]


def test_a_rank_may_have_several_threads_if_asked() -> None:
    assert run_forked(1, targets.total, 0, threads=2) == [(0, 0.0, 2)]


def test_a_rank_that_is_done_waits_for_the_others() -> None:
    assert run_forked(2, targets.late_receiver) == [5.0, 5.0]


def test_progress_is_that_of_rank_0() -> None:
    heard: list[tuple[int, int, str]] = []

    def hear(done: int, total: int, text: str) -> None:
        heard.append((done, total, text))

    run_forked(2, targets.progressing, progress=hear)
    assert heard == [(done + 1, 3, f"step {done} of rank 0") for done in range(3)]


@pytest.mark.parametrize(
    ("how", "status", "words"),
    [
        ("raise", None, "rank 1 of 3 raised ValueError: planted"),
        ("leave", None, "rank 1 of 3 raised SystemExit: 0"),
        ("exit", 7, "rank 1 of 3 exited with status 7 and without a result; the last it wrote:\n    the last words"),
        ("abort", -signal.SIGABRT, "rank 1 of 3 was killed by SIGABRT"),
    ],
)
def test_the_first_rank_that_fails_ends_the_world(how: str, status: int | None, words: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed) as failed:
        run_forked(3, targets.stuck_unless, 1, how)
    assert time.monotonic() - start < 5
    assert (failed.value.rank, failed.value.status) == (1, status)
    assert str(failed.value).startswith(words)


def test_the_traceback_shows_where_the_rank_raised() -> None:
    with pytest.raises(RankFailed, match=r'launch_targets\.py", line \d+, in _end\n.*\n *ValueError: planted'):
        run_forked(2, targets.stuck_unless, 0, "raise")


def test_a_world_that_takes_too_long_is_ended_and_says_where_it_is() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed) as failed:
        run_forked(2, targets.stuck_unless, 1, "wait", timeout_s=1.0)
    assert time.monotonic() - start < 4
    said = str(failed.value)
    assert said.startswith("rank 0, 1 of 2 did not end within 1 s; raise --timeout\n")
    assert "in all_reduce" in said.split("rank 1 is here", maxsplit=1)[0]
    assert "in _end" in said.split("rank 1 is here")[1]


def test_a_result_that_cannot_be_sent_is_a_failure_of_its_rank() -> None:
    with pytest.raises(RankFailed, match="pickle"):
        run_forked(2, targets.unpicklable)


def test_ranks_that_were_told_different_runs_do_not_start() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of 3 was told another run than the rest .*digest bbb, the rest aaa"):
        run_forked(3, targets.disagreeing, ("aaa", "bbb", "aaa"))
    assert run_forked(2, targets.disagreeing, ("aaa", "aaa")) == [None, None]


def test_an_interrupt_ends_the_world() -> None:
    def interrupt(done: int, total: int, text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_forked(2, targets.progressing, progress=interrupt)


def kill_one_of(world: int, folder: Path, seed: int, notice_s: float = 0.0) -> None:
    """Kill -9 a rank while all are in collectives; the parent must say so, soon.

    The server, whose word its death is, is held up for `notice_s`.
    """
    choice = random.Random(seed)  # noqa: S311  # which rank and when, the same in every run
    victim, delay_s = choice.randrange(world), choice.uniform(0.0, 0.3)

    def kill() -> None:
        while len(list(folder.iterdir())) < world or not (folder / f"{victim}").read_text():
            time.sleep(0.01)
        time.sleep(delay_s)
        if notice_s:
            os.kill(server_pid(), signal.SIGSTOP)
        os.kill(int((folder / f"{victim}").read_text()), signal.SIGKILL)
        if notice_s:
            time.sleep(notice_s)
            os.kill(server_pid(), signal.SIGCONT)

    killer = threading.Thread(target=kill)
    killer.start()
    start = time.monotonic()
    with pytest.raises(RankFailed) as failed:
        run_forked(world, targets.collectives, str(folder), timeout_s=30)
    killer.join()
    assert time.monotonic() - start < 10
    assert (failed.value.rank, failed.value.status) == (victim, -signal.SIGKILL)
    assert "SIGKILL" in str(failed.value)


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_is_killed_in_a_collective_ends_the_world(seed: int, tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    kill_one_of(3, folder, seed)


def test_an_echo_is_not_taken_for_the_cause(tmp_path: Path) -> None:
    """The others' broken collectives are known before the death that broke them."""
    folder = tmp_path / "ranks"
    folder.mkdir()
    kill_one_of(3, folder, seed=3, notice_s=0.1)


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(100, 110))
def test_ten_worlds_of_eight_lose_a_rank(seed: int, tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    kill_one_of(8, folder, seed)


def test_the_server_does_not_hear_a_terminal_while_it_imports_torch() -> None:
    status = Path(f"/proc/{server_pid()}/status").read_text(encoding="utf-8")
    blocked = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigBlk:"))
    assert blocked & 1 << (signal.SIGINT - 1)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "and this process does"


def test_a_rank_that_is_forked_after_its_parent_has_gone_says_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = multiprocessing.Pipe()
    gone = Seat(rank=0, world=1, folder=str(tmp_path / "gone"), server="", threads=1, group_s=1.0, show=False)
    late = context.Process(target=serve, args=(theirs, gone, b""), daemon=True)
    late.start()
    theirs.close()
    late.join(GONE_S)
    assert late.exitcode == ORPHANED
    ours.close()


def test_a_server_that_ends_before_it_has_forked_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(fds: object) -> None:
        del fds
        raise EOFError

    monkeypatch.setattr(forkserver, "connect_to_new_process", gone)
    with pytest.raises(RankFailed, match="rank 0 of 2 was not started: the process that forks ranks ended"):
        run_forked(2, targets.environment)


def test_a_temporary_folder_with_a_path_too_long_for_a_socket_is_named(tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 100)
    folder.mkdir()
    code = "from launch_targets import environment; from trainledger.runtime.launch.fork import run_forked"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; run_forked(1, environment)"],
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(Path(targets.__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "is too long for one; set TMPDIR to a folder with a shorter one" in done.stderr


GONE_S = 10
"""Seconds after which nothing of a run that was killed may be left."""


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A temporary folder whose path leaves room for that of a socket in it."""
    with tempfile.TemporaryDirectory(prefix="ranks-", dir=SHORT, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.mark.parametrize("blow", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.proof)])
def test_no_rank_survives_its_parent(blow: signal.Signals, tmp_path: Path, scratch: Path) -> None:
    mark = f"LAUNCH_TEST_MARK={tmp_path}"
    folder = tmp_path / "ranks"
    folder.mkdir()
    environment = {**os.environ, "LAUNCH_TEST_MARK": str(tmp_path), "TMPDIR": str(scratch)}
    with subprocess.Popen(
        [sys.executable, str(Path(targets.__file__)), str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"running\n"
        # The parent, its server, the standard library's tracker of resources, and three ranks.
        assert len(targets.marked_processes(mark)) == 6
        parent.send_signal(blow)
        start = time.monotonic()
        while targets.marked_processes(mark) and time.monotonic() - start < GONE_S:
            time.sleep(0.05)
    assert targets.marked_processes(mark) == []
    left = [file.name for file in scratch.iterdir() if not file.name.startswith("torchinductor")]
    assert left == [], "torch makes a cache of its own when it is imported, and nothing else may stay"


def test_a_death_says_what_it_is_known_to_come_from() -> None:
    for number, why in ((signal.SIGKILL, "fewer ranks or smaller shapes"), (signal.SIGBUS, "a file is cut short")):
        said = str(died(1, 2, -number, ""))
        assert said.startswith(f"rank 1 of 2 was killed by {number.name}, as the kernel does")
        assert why in said


def test_ranks_whose_server_is_killed_are_ended_and_it_is_said_once(tmp_path: Path, scratch: Path) -> None:
    mark = f"LAUNCH_TEST_MARK={tmp_path}"
    folder = tmp_path / "ranks"
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, str(Path(targets.__file__)), str(folder)],
        env={**os.environ, "LAUNCH_TEST_MARK": str(tmp_path), "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        assert parent.stdout.readline() == "running\n"
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        (server,) = (pid for pid in children if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(int(server), signal.SIGKILL)
        said = parent.stderr.read()
    assert "was lost: the process that forks ranks ended, as when it is killed or memory runs out" in said
    assert said.count("Traceback") == 1, "that of the script, which catches nothing"
    start = time.monotonic()
    while targets.marked_processes(mark) and time.monotonic() - start < GONE_S:
        time.sleep(0.05)
    assert targets.marked_processes(mark) == []
