"""Phrases in a cell, by what they mean: data/measured/run_words.toml."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

import msgspec

from trainledger.facts.load import load_toml
from trainledger.scoring.cells import Cells
from trainledger.scoring.table import MEASURED
from trainledger.scoring.words import Phrases, Unclear

_ANY_NUMBER = "[0-9]+(?:st|nd|rd|th)?"


@lru_cache(maxsize=1)
def run_words() -> dict[str, Phrases]:
    """Phrases of each column of a table of runs, by their meaning."""
    return msgspec.convert(load_toml(MEASURED / "run_words.toml"), dict[str, Phrases])


class Found(NamedTuple):
    """A phrase of a cell: what it means, and the number in it where it has one."""

    meaning: str
    number: int | None


@lru_cache(maxsize=64)
def _pattern(topic: str) -> tuple[re.Pattern[str], tuple[str, ...]]:
    """What finds the phrases of a topic, longest first, as groups; and the meaning of each group."""
    known = [(phrase, meaning) for meaning, spellings in run_words()[topic].items() for phrase in spellings]
    known.sort(key=lambda pair: -len(pair[0]))
    groups = [f"({re.escape(phrase).replace('<n>', _ANY_NUMBER)})" for phrase, _ in known]
    return re.compile(rf"(?<![a-z0-9])(?:{'|'.join(groups)})(?![a-z0-9])"), tuple(meaning for _, meaning in known)


def find(topic: str, text: str) -> list[Found]:
    """The phrases in a text, in their order.

    >>> find("recompute_detail", "every 2nd layer")
    [Found(meaning='layers', number=2)]
    """
    pattern, known = _pattern(topic)
    found: list[Found] = []
    for match in pattern.finditer(text.lower()):
        number = re.search(r"[0-9]+", match[0])
        found.append(Found(known[(match.lastindex or 1) - 1], int(number[0]) if number else None))
    return found


def meanings(topic: str, text: str) -> list[str]:
    """The meanings of the phrases in a text, in their order, each once.

    >>> meanings("schedule", "1F1B-interleaved-vpp3"), meanings("gradients", "bf16 (grad_reduce_in_fp32=False)")
    (['interleaved'], ['bf16'])
    """
    return list(dict.fromkeys(phrase.meaning for phrase in find(topic, text)))


def one_meaning(cells: Cells, column: str, topic: str) -> str:
    """The one meaning of a cell; "" where it is blank. None that is known, or two, raise Unclear."""
    text = cells.words(column)
    if not text:
        return ""
    found = meanings(topic, text)
    if len(found) != 1:
        fault = f"means {' and '.join(found)} at once" if found else "holds no word that is known"
        raise Unclear(f"{column} is {cells.text(column)!r}, which {fault}; known: {', '.join(run_words()[topic])}")
    return found[0]


def number_after(text: str, pattern: str) -> int | None:
    """The number that follows a word of a cell, as in "dp_shard 8" or "FSDP=128".

    >>> number_after("Megatron-FSDP shard group 64", "shard group|degree"), number_after("full shard", "degree")
    (64, None)
    """
    match = re.search(rf"(?:{pattern})\s*[=: ]?\s*([0-9]+)\b", text.lower())
    return int(match[1]) if match else None
