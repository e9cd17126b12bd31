"""A launch command or script as flags and values: torchrun, deepspeed or accelerate, and the program that it starts.

Only flags are read: a script's own assignments (TP=2, ARGS=(...)) are put in where it names them, and nothing is run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any, cast

from trainledger.adapters.swift import ranks_in
from trainledger.errors import BadInput
from trainledger.facts.presets import aliases, find_preset

_ASSIGNED = re.compile(
    r"^[ \t]*(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_]*)=(\"[^\"\n]*\"|'[^'\n]*'|\$\(\([^)\n]*\)\)|[^\s(\"']+)",
    re.MULTILINE,
)
_NAMED = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}|([A-Za-z_][A-Za-z0-9_]*))")
_ARRAY = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\[[@*]\]\}")
_SUM = re.compile(r"\$\(\(([0-9*+ ]{1,40})\)\)")
LAUNCH = (
    "nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "rdzv_endpoint", "rdzv_backend", "num_gpus",
    "num_nodes", "include", "hostfile", "num_processes", "num_machines", "machine_rank", "main_process_port",
    "config_file",
)  # fmt: skip
"""Flags of launchers, each of one value: what follows it is the program."""
ENDINGS = ("-hf", "-mcore", "-Instruct", "-Chat", "-chat-hf", "-Base")
"""What a folder's name has behind that of the model, whose shapes are the same."""
DEPTH = 5
"""How often a value may itself name a variable."""


def flags_of(text: str) -> dict[str, Any]:
    """Every flag of a text by its name with underscores: a word, a list of words, or True where nothing follows.

    >>> flags_of("torchrun --nproc_per_node=8 t.py --bf16 --lora-target a b --lr -1")
    {'nproc_per_node': '8', 'bf16': True, 'lora_target': ['a', 'b'], 'lr': '-1'}
    """
    found: dict[str, Any] = {}
    name = ""
    for word in _words(text):
        if word.startswith("--") and len(word) > len("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("-", "_").rstrip(")")
            found[name] = value.rstrip(")") if value else True
        elif name and word in ("\\", ")"):
            continue
        elif name and word.endswith((";", "&&", "|", "&")) and word.strip(";&|") == "":
            name = ""
        elif name:
            _append(found, name, word.rstrip(")"))
    return {**ranks_in(text), **found} if found else found


def _append(found: dict[str, Any], name: str, word: str) -> None:
    held = found[name]
    if held is not True and name in LAUNCH:
        # the program that is launched
        return
    if held is True:
        found[name] = word
    elif word:
        found[name] = [*held, word] if isinstance(held, list) else [held, word]


def _words(text: str) -> list[str]:
    joined = re.sub(r"\\\r?\n", " ", text)
    plain = "\n".join(line for line in joined.splitlines() if not line.lstrip().startswith("#"))
    filled = _filled(plain)
    try:
        return shlex.split(filled)
    except ValueError:
        # an apostrophe in a sentence around the command
        return filled.split()


def _filled(text: str) -> str:
    """The text with what it assigns put in where it is named; other names stay, and are refused as values."""
    values: dict[str, str] = {}
    for name, written in _ASSIGNED.findall(text):
        own = _NAMED.fullmatch(written.strip("\"'"))
        # NAME=${NAME:-4} is 4 unless the environment says otherwise
        values[name] = own[2] if own is not None and own[1] == name and own[2] else written.strip("\"'")

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return values.get(name, match[2] or match[0])

    for _ in range(DEPTH):
        changed = _SUM.sub(_summed, _NAMED.sub(value, text))
        if changed == text:
            break
        text = changed
    return _ARRAY.sub(" ", text)


def _summed(match: re.Match[str]) -> str:
    """Products and sums of a shell, such as $((8*2))."""
    total = 0
    for part in match[1].split("+"):
        product = 1
        for factor in part.split("*"):
            product *= int(factor) if factor.strip().isdigit() else 0
        total += product
    return str(total)


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


def number(flags: Mapping[str, Any], name: str, where: str) -> int:
    """A whole number; a variable that nothing assigns is named."""
    value = one_of(flags[name])
    text = value if isinstance(value, str) else str(value)
    if isinstance(value, str) and value.startswith("$"):
        raise BadInput(f"{where}: --{name} is {value}, and nothing here assigns it; write the number")
    try:
        found = float(text)
    except ValueError:
        raise BadInput(f"{where}: --{name} is {text!r}: write a whole number") from None
    if isinstance(value, bool) or found != int(found):
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
