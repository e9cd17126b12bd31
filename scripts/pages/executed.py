"""Run the commands that a page shows and put their real output under them.

A block counts when its fence says `console` and its first line starts with `$ `; everything under that line is
replaced by what the command prints in a pipe. Commands run in the repository's root, without a shell.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

from trainledger.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"```console\n\$ (?P<command>[^\n]+)\n(?P<output>.*?)```\n", re.DOTALL)


def refresh(text: str) -> str:
    """The page with every console block executed anew."""
    return BLOCK.sub(lambda match: f"```console\n$ {match['command']}\n{output_of(match['command'])}```\n", text)


def output_of(command: str) -> str:
    """What `trainledger ...` or `python ...` prints, standard error after standard output.

    ` | head -N` or ` | tail -N` at the end cuts it; a program after a bar reads what the one before it printed.
    """
    programs = _programs(command)
    cut = programs.pop() if programs[-1][0] in {"head", "tail"} else []
    printed, errors = "", ""
    for words in programs:
        printed, complaint = _run(words, printed)
        errors += complaint
    lines = (printed + errors).splitlines()
    if cut:
        count = int(cut[1].removeprefix("-"))
        lines = lines[:count] if cut[0] == "head" else lines[-count:]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _programs(command: str) -> list[list[str]]:
    """The words of each program of a pipeline.

    >>> _programs("trainledger list models | python -c 'print(1 | 2)'")
    [['trainledger', 'list', 'models'], ['python', '-c', 'print(1 | 2)']]
    """
    programs: list[list[str]] = [[]]
    for word in shlex.split(command):
        if word == "|":
            programs.append([])
        else:
            programs[-1].append(word)
    return programs


def _run(words: list[str], given: str) -> tuple[str, str]:
    """(standard output, standard error); our own command runs in this process, for a page has dozens of them."""
    program, *arguments = words
    if program == "trainledger":
        out, err = io.StringIO(), io.StringIO()
        with contextlib.chdir(ROOT), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(arguments)
        return out.getvalue(), err.getvalue()
    if program != "python":
        raise SystemExit(
            f"a console block runs {program!r}: only trainledger, python and a last `head` or `tail` are run"
        )
    call = [sys.executable, *arguments]
    done = subprocess.run(call, cwd=ROOT, input=given, capture_output=True, text=True, check=False)
    return done.stdout, done.stderr
