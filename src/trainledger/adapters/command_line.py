"""A launch command or script as flags and values: torchrun, deepspeed or accelerate, and the program that it starts.

Only flags are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from trainledger.adapters.shell import BREAK, filled, uncommented, words
from trainledger.adapters.swift import ranks_in
from trainledger.errors import BadInput
from trainledger.facts.presets import aliases, find_preset

LAUNCH = (
    "nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "rdzv_endpoint", "rdzv_backend", "num_gpus",
    "num_nodes", "include", "hostfile", "num_processes", "num_machines", "machine_rank", "main_process_port",
    "config_file",
)  # fmt: skip
"""Flags of launchers, each of one value: what follows it is the program."""
RANKS = (
    "nproc_per_node", "nnodes", "gpus_per_node", "num_gpus", "num_nodes", "include", "num_processes", "num_machines",
    "world_size",
)  # fmt: skip
"""Flags that say how many ranks there are."""
FALSE = ("false", "0", "no", "none", "")
"""Words of what is switched off, in lower case."""
ENDINGS = ("-hf", "-mcore", "-Instruct", "-Chat", "-chat-hf", "-Base")
"""What a folder's name has behind that of the model, whose shapes are the same."""
_NAME = re.compile(r"--([A-Za-z][A-Za-z0-9_.-]*)(?:=(.*))?", re.DOTALL)


def flags_of(text: str) -> dict[str, Any]:
    """Every flag of a text by its name with underscores: a word, a list of words, or True where nothing follows.

    >>> flags_of("torchrun --nproc_per_node=8 t.py --bf16 --lora-target a b --lr -1")
    {'nproc_per_node': '8', 'bf16': True, 'lora_target': ['a', 'b'], 'lr': '-1'}
    """
    plain = uncommented(text)
    found = dict(_said(plain))
    return {**ranks_in(filled(plain)), **found} if found else found


def said_otherwise(text: str) -> dict[str, tuple[Any, Any]]:
    """Flags that stand twice with different values, as where a script has the commands of several runs: two of them.

    >>> said_otherwise("a --b 1 --c; d --b 2 --c")
    {'b': ('1', '2')}
    """
    first: dict[str, Any] = {}
    found: dict[str, tuple[Any, Any]] = {}
    for name, value in _said(uncommented(text)):
        if one_of(first.setdefault(name, value)) != one_of(value):
            found[name] = (first[name], value)
    return found


def _said(text: str) -> list[tuple[str, Any]]:
    """(name, value) of each flag, in their order."""
    said: list[tuple[str, Any]] = []
    takes = False
    for word in words(text):
        flag = _NAME.fullmatch(word.rstrip(";,`"))
        if flag is not None:
            said.append((flag[1].replace("-", "_"), flag[2] or True))
            takes = True
        elif word == BREAK:
            takes = False
        elif takes and word != "\\":
            said[-1] = (said[-1][0], _with(*said[-1], word))
    return said


def _with(name: str, held: Any, word: str) -> Any:  # noqa: ANN401 - a flag's value is a word, several or none
    """A flag's value with a further word; what follows the one of a launcher is the program."""
    if held is True:
        return word
    if name in LAUNCH or not word:
        return held
    return [*held, word] if isinstance(held, list) else [held, word]


def one_of(value: object) -> object:
    """The value of a flag that takes one: a word after it is of the program, such as the name of a script."""
    return cast("list[object]", value)[0] if isinstance(value, list) and value else value


def ranks_of(flags: Mapping[str, Any], where: str) -> int | None:
    """Ranks of a job by what a launcher is told; None where it is not."""
    include = one_of(flags.get("include"))
    if isinstance(include, str) and ":" in include:
        return sum(len(host.partition(":")[2].split(",")) for host in include.split("@"))
    for each, nodes in (("nproc_per_node", "nnodes"), ("num_gpus", "num_nodes"), ("gpus_per_node", "nnodes")):
        if each in flags:
            return number(flags, each, where) * (number(flags, nodes, where) if nodes in flags else 1)
    for name in ("num_processes", "world_size"):
        if name in flags:
            return number(flags, name, where)
    return None


def typed(value: object) -> str:
    """A flag's value as it was typed, cut where it is long.

    >>> typed(True), typed(["a", "b"]), typed(None)
    ('', 'a b', 'None')
    """
    text = "" if value is True else " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def number(flags: Mapping[str, Any], name: str, where: str) -> int:
    """A whole number; a variable that nothing assigns is named."""
    value = one_of(flags[name])
    text = value if isinstance(value, str) else str(value)
    if isinstance(value, str) and value.startswith("$"):
        raise BadInput(f"{where}: --{name} is {value}, and nothing here assigns it one value; write the number")
    try:
        found = float(text)
    except ValueError:
        raise BadInput(f"{where}: --{name} is {text!r}: write a whole number") from None
    if isinstance(value, bool) or not found.is_integer():
        raise BadInput(f"{where}: --{name} is {text!r}: write a whole number")
    return int(found)


def preset_of(named: object) -> str | None:
    """The preset that a model's name or path means; None where it is none.

    >>> preset_of("/data/hf/llama-7b/"), preset_of("ZhipuAI/GLM-4.5-Air-Base-mcore"), preset_of("./my-model")
    ('llama-2-7b', 'glm-4.5-air', None)
    >>> preset_of("meta-llama/Meta-Llama-3.1-8B-Instruct")
    'llama-3-8b'
    """
    if not isinstance(named, str):
        return None
    last = named.rstrip("/").rpartition("/")[2]
    for name in (named, last, *(last.removesuffix(end) for end in ENDINGS if last.endswith(end))):
        preset = find_preset(name)
        if preset is not None:
            return preset
    every = {other.rpartition("/")[2].lower(): other for other in aliases()}
    for name in (last, *(last.removesuffix(end) for end in ENDINGS if last.endswith(end))):
        if name.lower() in every:
            return find_preset(every[name.lower()])
    return None
