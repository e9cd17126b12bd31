"""The command as a process: what it imports, how it starts, and how it ends when its reader or its user leaves."""

from __future__ import annotations

import os
import pty
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "scipy", "pandas", "rich", "litestar", "huggingface_hub", "pydantic")
STATES = ("states", "llama-3-70b", "--gpus", "64")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "trainledger", *arguments]


def modules_after(*arguments: str) -> set[str]:
    """The modules that a fresh process has loaded when the command is done."""
    code = (
        "import sys; from trainledger.cli.main import main; "
        f"code = main({list(arguments)!r}); print(code, *sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    code_and_names = done.stderr.split()
    assert code_and_names[0] == "0", done.stderr
    return set(code_and_names[1:])


@pytest.mark.parametrize(
    "arguments",
    [STATES, (*STATES, "--json"), ("plan", "llama-3-8b", "--gpus", "8", "--gpu", "h100"), ("list", "models")],
    ids=lambda arguments: arguments[0],
)
def test_a_lean_verb_imports_no_heavy_library(arguments: tuple[str, ...]) -> None:
    assert modules_after(*arguments).isdisjoint(HEAVY)


@pytest.mark.parametrize("arguments", [("--version",), ("--help",), ("list", "models")])
def test_what_needs_no_arrays_imports_no_numpy(arguments: tuple[str, ...]) -> None:
    assert "numpy" not in modules_after(*arguments)


def test_a_verb_imports_no_other_verb() -> None:
    loaded = modules_after(*STATES)
    assert "trainledger.service.states" in loaded
    assert loaded.isdisjoint(f"trainledger.service.{name}" for name in ("ledger", "plan", "diff", "list", "score"))


def test_states_answer_within_half_a_second(tmp_path: Path) -> None:
    """Processor time of a fresh process, with bytecode as pip leaves it; the clock would measure the neighbours too."""
    environment = {**ENVIRONMENT, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    times: list[float] = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command(*STATES), env=environment, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(times[1:]) < 0.5


@pytest.mark.parametrize("arguments", [("list", "accelerators", "--json"), ("--help",)])
def test_a_reader_that_leaves_is_no_error(arguments: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command(*arguments), env=ENVIRONMENT, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_interrupt_ends_with_130_and_says_nothing() -> None:
    code = (
        "import os, signal, sys; import trainledger.service.list as verb; from trainledger.cli.main import main; "
        "verb.run = lambda request: os.kill(os.getpid(), signal.SIGINT); sys.exit(main(['list', 'models']))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_a_full_disk_is_an_error_that_says_so() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            command("list", "rules"), env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [STATES, (*STATES, "--json"), ("--version",), ("--help",)])
def test_a_closed_output_is_an_error_that_says_so(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command(*arguments)], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "standard output is closed" in done.stderr


def test_an_error_that_nobody_can_read_does_not_go_to_the_answer() -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *command("states", "nowhere")], env=ENVIRONMENT, stdout=subprocess.PIPE,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, b"")


def test_bytes_that_are_no_text_are_refused() -> None:
    done = subprocess.run(
        [*map(os.fsencode, command("model")), b"\xff"], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "not text" in done.stderr


def at_a_terminal(*arguments: str, **variables: str) -> str:
    """What a terminal shows: the command writes to a pseudo-terminal."""
    leader, follower = pty.openpty()
    environment = {**ENVIRONMENT, "TERM": "xterm-256color", **variables}
    environment.pop("NO_COLOR", None)
    done = subprocess.run(command(*arguments), env=environment, stdout=follower, stderr=follower, check=False)
    os.close(follower)
    text = b""
    while chunk := _read(leader):
        text += chunk
    os.close(leader)
    assert done.returncode == 0
    return text.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:
        return b""


def test_a_terminal_shows_the_same_text_in_colour() -> None:
    arguments = ("list", "optimizers")
    plain = subprocess.run(command(*arguments), env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout
    assert "\x1b[" not in plain
    assert "\x1b[" in at_a_terminal(*arguments)
    assert at_a_terminal(*arguments, TERM="dumb") == plain
