"""Run the command line inside this process, as a pipe would see it, and compare screens with golden files."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from trainledger.cli.main import main

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
UPDATE = "TRAINLEDGER_UPDATE_GOLDEN"
"""Set this variable to write the golden files anew; then read the difference."""


class Done(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        assert self.err == "", self.err
        return json.loads(self.out)


def run(*arguments: str) -> Done:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return Done(code, out.getvalue(), err.getvalue())


def answer(*arguments: str, code: int = 0) -> dict[str, Any]:
    """The JSON answer of a command that ends with this code."""
    done = run(*arguments, "--json")
    assert done.code == code, done
    return done.json()


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get(UPDATE):
        path.write_text(text, encoding="utf-8")
    assert path.is_file(), f"{path} is missing: run with {UPDATE}=1 and read what it writes"
    assert text == path.read_text(encoding="utf-8"), f"{name} changed: run with {UPDATE}=1 and read the difference"
