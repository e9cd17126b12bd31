"""YAML as launchers write it: mappings, lists of plain values, comments. What else YAML can do is refused by line."""

from __future__ import annotations

import re
from typing import Any

from trainledger.errors import BadInput

_LINE = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z0-9_.$/-]+|\"[^\"]*\"|'[^']*') *:(?: +(?P<value>.*))?$")
_ITEM = re.compile(r"(?P<indent> *)- *(?P<value>.*)$")
_NUMBER = re.compile(r"[+-]?[0-9][0-9_]*(\.[0-9]*)?([eE][+-]?[0-9]+)?")
_WORDS: dict[str, object] = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
    **dict.fromkeys(("null", "~", "")),
}
"""Plain words that are values, as YAML 1.1 has them."""


def parse_yaml(text: str, *, where: str) -> dict[str, Any]:
    """The mapping of a file.

    >>> parse_yaml("a: {}  # of b", where="a.yaml"), parse_yaml("c: [x, 'no', no]", where="c.yaml")
    ({'a': {}}, {'c': ['x', 'no', False]})
    """
    root: dict[str, Any] = {}
    open_at: list[tuple[int, dict[str, Any]]] = [(-1, root)]
    waiting: tuple[int, dict[str, Any], str] | None = None
    for number, raw in enumerate(text.splitlines(), 1):
        line = _uncommented(raw).rstrip()
        if not line.strip() or line.strip() in ("---", "..."):
            continue
        item = _ITEM.match(line)
        if item is not None and waiting is not None and len(item["indent"]) >= waiting[0]:
            _listed(waiting, _scalar(item["value"], where, number), where, number)
            continue
        match = _LINE.match(line)
        if match is None:
            raise _refused(where, number, raw)
        indent = len(match["indent"])
        if waiting is not None and indent > waiting[0]:
            inner = waiting[1][waiting[2]] = {}
            open_at.append((waiting[0], inner))
        while indent <= open_at[-1][0]:
            open_at.pop()
        waiting = _entered(open_at[-1][1], match, where, number)
    return root


def _entered(
    table: dict[str, Any], match: re.Match[str], where: str, number: int
) -> tuple[int, dict[str, Any], str] | None:
    """Put a key into its mapping; what waits for the lines below it where it has no value."""
    key, text = match["key"].strip("\"'"), (match["value"] or "").strip()
    if key in table:
        raise BadInput(f"{where}: line {number}: the key {key!r} stands twice in one mapping; remove one")
    table[key] = _scalar(text, where, number)
    return None if text else (len(match["indent"]), table, key)


def _listed(waiting: tuple[int, dict[str, Any], str], value: object, where: str, number: int) -> None:
    _, table, key = waiting
    if table[key] is None:
        table[key] = []
    if not isinstance(table[key], list):
        raise _refused(where, number, f"- {value}")
    table[key].append(value)


def _uncommented(line: str) -> str:
    """The line up to a comment, which follows a space and stands outside quotes."""
    quote = ""
    for at, char in enumerate(line):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char == "#" and (at == 0 or line[at - 1].isspace()):
            return line[:at]
    return line


def _scalar(text: str, where: str, number: int) -> Any:  # noqa: ANN401 - YAML's values are of any type
    text = text.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if text[0] in "\"'" and len(text) > 1 and text[-1] == text[0]:
        return text[1:-1]
    if text in ("{}", "[]"):
        return {} if text == "{}" else []
    if text[0] == "[" and text[-1] == "]" and not set("[]{}:") & set(text[1:-1]):
        return [_scalar(part, where, number) for part in text[1:-1].split(",")]
    if text[0] in "[{|>&*!%@`":
        raise _refused(where, number, text)
    if _NUMBER.fullmatch(text):
        plain = text.replace("_", "")
        return int(plain) if plain.lstrip("+-").isdigit() else float(plain)
    return text


def _refused(where: str, number: int, line: str) -> BadInput:
    return BadInput(
        f"{where}: line {number}: {line.strip()[:60]!r} is YAML that is not read here; write key: value on a line of "
        "its own, mappings indented below their key"
    )
