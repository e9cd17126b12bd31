"""YAML as PyYAML's safe loader reads it, which accelerate and transformers use; keys that stand twice are refused."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

from trainledger.errors import BadInput

if TYPE_CHECKING:
    import yaml

LONGEST = 1 << 16
"""Characters of a file of settings; PyYAML reads about 100,000 a second."""
_POWER = re.compile(r"[+-]?[0-9][0-9_]*(\.[0-9_]*)?[eE][+-]?[0-9]+")
"""1e-4, which YAML 1.1 has as a text, and the programs that read these files as the number."""
_TEXT, _FLOAT = "tag:yaml.org,2002:str", "tag:yaml.org,2002:float"


def parse_yaml(text: str, *, where: str) -> dict[str, Any]:
    """The mapping of a file.

    >>> parse_yaml("a: {b: 1e-3}  # of b", where="a.yaml"), parse_yaml("c: [x, 'no', no]", where="c.yaml")
    ({'a': {'b': 0.001}}, {'c': ['x', 'no', False]})
    """
    import yaml

    if len(text) > LONGEST:
        raise BadInput(f"{where} has {len(text):,} characters, and settings have {LONGEST:,} at most; check the path")
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode):
            raise _refused(where, node, "the file is no mapping; write key: value on lines of their own")
        _check(node, where)
        return cast("dict[str, Any]", loader.construct_document(node))
    except yaml.YAMLError as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error).partition("\n")[0]
        line = "" if mark is None else f" line {mark.line + 1}:"
        raise BadInput(f"{where}:{line} is no YAML ({problem}); correct it there") from None
    except RecursionError:
        raise BadInput(f"{where}: is nested too deep to be read; settings have a few levels") from None
    except ValueError as error:
        raise BadInput(f"{where}: has a value that cannot be read ({error}); put it in quotes") from None


def _check(root: yaml.Node, where: str) -> None:
    """Refuse keys that stand twice, of which PyYAML takes the last; and aliases, for each key has a line of its own."""
    import yaml

    seen: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            raise _refused(where, node, "an alias (*) stands for what is written here; write it out where it is used")
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            _check_keys(node, where)
            waiting += [each for pair in node.value for each in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif node.tag == _TEXT and not cast("yaml.ScalarNode", node).style and _POWER.fullmatch(node.value):
            node.tag = _FLOAT


def _check_keys(node: yaml.MappingNode, where: str) -> None:
    keys: set[str] = set()
    for key, _ in node.value:
        if key.tag != _TEXT:
            raise _refused(where, key, "a key is no text; put it in quotes")
        if key.value in keys:
            raise _refused(where, key, f"the key {key.value!r} stands twice in one mapping; remove one")
        keys.add(key.value)


def _refused(where: str, node: yaml.Node, what: str) -> BadInput:
    return BadInput(f"{where}: line {node.start_mark.line + 1}: {what}")
