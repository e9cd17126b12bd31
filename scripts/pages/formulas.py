"""The page of sources: every citation key, what it stands for, and the functions and profile rows that cite it."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pages.hardware import table

SOURCE = Path(__file__).resolve().parents[2] / "src" / "trainledger"
REFERENCES = SOURCE / "data" / "references.toml"
BRACKET = re.compile(r"\s?\[([a-z][^\[\]\n]*)\]")

INTRO = """# Formulas and their sources

What is computed cites a key of `src/trainledger/data/references.toml`. Under each key: what it stands for, where to
read it, what in the code cites it (in a docstring, a comment or the lines it makes) with the place in the source, and
which buffers of an engine's profile do. `trainledger ledger MODEL ... --explain LINE` prints the sources of one line.
"""


class Part(NamedTuple):
    """A function, class, documented constant or module: its lines and its docstring."""

    first: int
    last: int
    name: str
    docstring: str


class Citation(NamedTuple):
    """A key cited in one part of a module; `place` is where in the source."""

    key: str
    place: str
    module: str
    part: Part


def render() -> str:
    """The whole page."""
    references = tomllib.loads(REFERENCES.read_text(encoding="utf-8"))
    known = frozenset(references)
    cited = [citation for path in sorted(SOURCE.rglob("*.py")) for citation in _in_module(path, known)]
    rows = [row for path in sorted(SOURCE.rglob("*.toml")) if path != REFERENCES for row in _in_toml(path, known)]
    return "\n".join([INTRO, *(_section(key, entry, cited, rows, known) for key, entry in references.items())])


def _section(
    key: str, entry: dict[str, str], cited: list[Citation], rows: list[tuple[str, str, str]], known: frozenset[str]
) -> str:
    parts = [f"## {key}\n", f"{entry['title']}. {_link(entry['where'])}\n"]
    if "note" in entry:
        parts.append(f"Note: {entry['note']}.\n")
    mine = {(c.module, c.part): c.place for c in reversed(cited) if c.key == key}
    if mine:
        lines = [
            (f"`{module}`", f"`{part.name}`" if part.name else "the module", place or "-", _says(part, known))
            for (module, part), place in sorted(mine.items())
        ]
        parts.append(table(("module", "what", "place", "says"), lines))
    for file in dict.fromkeys(file for cite, file, _ in rows if cite == key):
        named = "; ".join(dict.fromkeys(what for cite, other, what in rows if (cite, other) == (key, file) and what))
        parts.append(f"`{file}`{f': {named}' if named else ''}.\n")
    return "\n".join(parts)


def _link(where: str) -> str:
    """An address as a link; a repository and file as code."""
    if where.startswith("https://"):
        return f"<{where}>"
    if where.startswith("arXiv "):
        return f"[{where}](https://arxiv.org/abs/{where.removeprefix('arXiv ')})"
    return f"`{where}`"


def _says(part: Part, known: frozenset[str]) -> str:
    """The first line of a docstring without its citations."""
    line = part.docstring.partition("\n")[0]
    for match in reversed(list(BRACKET.finditer(line))):
        if any(True for _ in keys(match[1], known)):
            line = line[: match.start()] + line[match.end() :]
    return line.rstrip(" .") or "-"


def keys(inside: str, known: frozenset[str]) -> Iterator[tuple[str, str]]:
    """(key, place) of what a bracket holds: key | key: place | key, key | key: place; key: place.

    >>> list(keys("megatron: arguments.py 12; deepspeed: a.py", frozenset({"megatron", "deepspeed"})))
    [('megatron', 'arguments.py 12'), ('deepspeed', 'a.py')]
    """
    for cite in inside.split("; "):
        head, _, place = cite.partition(": ")
        names = head.split(", ")
        if all(name in known for name in names):
            yield from ((name, place) for name in names)


def _in_module(path: Path, known: frozenset[str]) -> Iterator[Citation]:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    parts = list(_parts(tree))
    module = str(path.relative_to(SOURCE))
    lines = [] if module.startswith("profiles/") else list(_in_lines(tree, known))
    for line, key, place in sorted([*_in_docstrings(tree, known), *_in_comments(text, known), *lines]):
        inside = [part for part in parts if part.first <= line <= part.last]
        yield Citation(key, place, module, min(inside, key=lambda part: part.last - part.first))


def _parts(tree: ast.Module) -> Iterator[Part]:
    """The module, and every class, function and documented constant in it under its qualified name."""
    yield Part(0, 1 << 30, "", ast.get_docstring(tree) or "")
    todo: list[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef]] = [("", tree)]
    while todo:
        prefix, parent = todo.pop(0)
        for node, after in zip(parent.body, [*parent.body[1:], None], strict=True):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                name = f"{prefix}{node.name}"
                yield Part(node.lineno, node.end_lineno or node.lineno, name, ast.get_docstring(node) or "")
                todo.append((f"{name}.", node))
            elif isinstance(node, ast.Assign | ast.AnnAssign) and (text := _string(after)):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                last = after.end_lineno if after is not None else None
                yield Part(node.lineno, last or node.lineno, f"{prefix}{ast.unparse(target)}", text)


def _string(node: ast.stmt | None) -> str:
    """The text of a statement that is a string."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return ""


def _in_docstrings(tree: ast.Module, known: frozenset[str]) -> Iterator[tuple[int, str, str]]:
    """(line, key, place) of what strings that stand alone cite."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and (text := _string(node)):
            for inside in BRACKET.findall(text):
                yield from ((node.lineno, key, place) for key, place in keys(inside, known))


def _in_lines(tree: ast.Module, known: frozenset[str]) -> Iterator[tuple[int, str, str]]:
    """(line, key, "") of strings that are a key, on their way into a ledger line.

    A key without a hyphen may be the name of an engine; where it is a citation, a docstring has it too.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in known and "-" in node.value:
            yield node.lineno, node.value, ""


def _in_comments(text: str, known: frozenset[str]) -> Iterator[tuple[int, str, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            for inside in BRACKET.findall(token.string):
                yield from ((token.start[0], key, place) for key, place in keys(inside, known))


def _in_toml(path: Path, known: frozenset[str]) -> Iterator[tuple[str, str, str]]:
    """(key, file, what cites it or ""): rows that have a `cite`, and comments."""
    text = path.read_text(encoding="utf-8")
    file = str(path.relative_to(SOURCE))
    for value in tomllib.loads(text).values():
        for row in value if isinstance(value, list) else []:
            if isinstance(row, dict) and row.get("cite") in known:
                yield row["cite"], file, str(row.get("what", ""))
    for comment in re.findall(r"^\s*#(.*)", text, re.MULTILINE):
        for inside in BRACKET.findall(comment):
            yield from ((key, file, "") for key, _ in keys(inside, known))
