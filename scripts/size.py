"""Print every file, function and class that is longer than the house allows, and fail if there is one.

    python scripts/size.py [FILE|FOLDER ...]        (default: src)

A length is counted in lines from `def` or `class` to the last line, docstring and blank lines included.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LIMITS = {"file": 400, "function": 50, "class": 200}


class Piece(NamedTuple):
    """A file, function or class and how many lines it takes."""

    kind: str
    where: str
    lines: int


def pieces(path: Path) -> Iterator[Piece]:
    """Everything in one Python file that has a limit."""
    text = path.read_text(encoding="utf-8")
    yield Piece("file", str(path), len(text.splitlines()))
    for node in ast.walk(ast.parse(text, filename=str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            last = node.end_lineno or node.lineno
            yield Piece(kind, f"{path}:{node.lineno} {node.name}", last - node.lineno + 1)


def python_files(roots: list[Path]) -> list[Path]:
    """The Python files named, and those in the folders named."""
    files = {path for root in roots for path in ([root] if root.is_file() else root.rglob("*.py"))}
    return sorted(files)


def main(arguments: list[str]) -> int:
    """Print the offenders, longest overrun first, or the longest of each kind when there is none."""
    roots = [Path(argument) for argument in arguments or ["src"]]
    missing = [str(root) for root in roots if not root.exists()]
    if missing:
        print(f"size: no such file or folder: {', '.join(missing)}", file=sys.stderr)
        return 2
    found = [piece for path in python_files(roots) for piece in pieces(path)]
    over = sorted((p for p in found if p.lines > LIMITS[p.kind]), key=lambda p: LIMITS[p.kind] - p.lines)
    for piece in over:
        print(f"{piece.lines:5} lines, limit {LIMITS[piece.kind]:3}  {piece.kind:8}  {piece.where}")
    if over:
        print(f"size: {len(over)} too long; split each by idea")
        return 1
    for kind, limit in LIMITS.items():
        longest = max((p for p in found if p.kind == kind), key=lambda p: p.lines, default=None)
        if longest:
            print(f"longest {kind}: {longest.lines} of {limit} lines, {longest.where}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
