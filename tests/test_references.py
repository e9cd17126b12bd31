"""Every citation has an entry in data/references.toml, and every entry is cited."""

from __future__ import annotations

import ast
import re
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "trainledger"
REFERENCES = SOURCE / "data" / "references.toml"
KEY = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
BRACKET = re.compile(r"\[([a-z][^\[\]\n]*)\]")
CITING = {"collective", "calls", "across", "fixed", "averaged", "summed"}
"""Functions whose last string argument is a citation."""


def references() -> dict[str, dict[str, str]]:
    return tomllib.loads(REFERENCES.read_text(encoding="utf-8"))


def in_brackets(text: str, known: set[str]) -> Iterator[str]:
    """Keys of [key], [key: where] and [key, key]; a word without hyphen or place is a key only where it is known.

    A shape such as [plans, rows] is thereby none.
    """
    for inside in BRACKET.findall(text):
        head, placed, _ = inside.partition(": ")
        keys = [head] if placed else inside.split(", ")
        if all(KEY.fullmatch(key) for key in keys):
            yield from (key for key in keys if placed or "-" in key or key in known)


def in_python(path: Path, known: set[str]) -> Iterator[str]:
    """Keys in docstrings, comments, cite arguments and the calls that end in one."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT and not token.string.startswith("# type:"):
                yield from in_brackets(token.string, known)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and node.value in known:
            yield str(node.value)  # a citation on its way through a table or a variable
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from in_brackets(node.value.value, known)
        if isinstance(node, ast.Call):
            yield from _cited(node)


def _cited(call: ast.Call) -> Iterator[str]:
    cites = [keyword.value for keyword in call.keywords if keyword.arg in ("cite", "cites")]
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in CITING and call.args and isinstance(call.args[-1], ast.Constant):
        cites.append(call.args[-1])
    for cite in cites:
        for part in ast.walk(cite):
            if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value:
                yield part.value


def in_toml(path: Path, known: set[str]) -> Iterator[str]:
    """Values of `cite`, and keys in comments."""
    text = path.read_text(encoding="utf-8")
    yield from re.findall(r'^cite = "([^"]+)"', text, re.MULTILINE)
    for comment in re.findall(r"^\s*#(.*)", text, re.MULTILINE):
        yield from in_brackets(comment, known)


def used() -> dict[str, list[str]]:
    """Where each key is cited."""
    known = set(references())
    where: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*")):
        if path.suffix == ".py":
            keys = in_python(path, known)
        elif path.suffix == ".toml" and path != REFERENCES:
            keys = in_toml(path, known)
        else:
            continue
        for key in keys:
            where.setdefault(key, []).append(str(path.relative_to(SOURCE)))
    return where


def test_every_citation_has_its_entry() -> None:
    missing = {key: places for key, places in used().items() if key not in references()}
    assert not missing


def test_every_entry_is_cited() -> None:
    assert not set(references()) - set(used())


def test_an_entry_says_what_and_where() -> None:
    assert references()
    for key, entry in references().items():
        assert KEY.fullmatch(key)
        assert set(entry) <= {"title", "where", "note"}, key
        assert entry["title"], key
        assert re.search(r"https://|@ |\barXiv \d", entry["where"]), key
    titles = [entry["title"] for entry in references().values()]
    assert len(titles) == len(set(titles))


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("bytes [plans, rows]", []),
        ("cut [fsdp2-units]", ["fsdp2-units"]),
        ("as there [paper: section 5, P_os+g]", ["paper"]),
        ("both [paper, fsdp2-units]", ["paper", "fsdp2-units"]),
        ("list[str] and x[index]", []),
    ],
)
def test_what_counts_as_a_citation(text: str, keys: list[str]) -> None:
    assert list(in_brackets(text, {"paper"})) == keys
