"""Run the commands that a page shows and put their real output under them.

A block counts when its fence says `console` and its first line starts with `$ `; everything under that line is
replaced by what the command prints in a pipe. Commands run in the repository's root, without a shell.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"```console\n\$ (?P<command>[^\n]+)\n(?P<output>.*?)```\n", re.DOTALL)


def refresh(text: str) -> str:
    """The page with every console block executed anew."""
    return BLOCK.sub(lambda match: f"```console\n$ {match['command']}\n{output_of(match['command'])}```\n", text)


def output_of(command: str) -> str:
    """What `trainledger ...` or `python ...` prints, standard error after standard output; ` | head -N` cuts it."""
    command, _, head = command.partition(" | head -")
    program, *arguments = shlex.split(command)
    if program == "trainledger":
        call = [sys.executable, "-m", "trainledger", *arguments]
    elif program == "python":
        call = [sys.executable, *arguments]
    else:
        raise SystemExit(f"a console block runs {program!r}: only trainledger and python are run")
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    return "\n".join(line.rstrip() for line in lines[: int(head) if head else None]) + "\n"
