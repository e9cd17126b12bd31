"""The little languages of three columns, read into what an account needs. The words are data/measured/states.toml.

precision   clauses between commas: a dtype of the whole recipe ("fp16 mixed"), a dtype with what it belongs to
            ("fp16 param", "grads fp32"), an optimizer ("Adam"), its bytes per parameter ("K=12"), "precision-aware"
quantity    categories ("params+grads+optimizer") or all of them ("model states"); "per GPU"; a case of DeepSpeed's
            page; options as name=value ("offload_optimizer=cpu")
model       "7.5B"; "t5-3b (2851M, largest layer 32M)"

A word that is not in the data, or two words that contradict each other, raise Unclear: nothing is guessed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from functools import lru_cache

import msgspec

from trainledger.facts.load import load_toml
from trainledger.profiles.profile import Category, Instant
from trainledger.scoring.table import MEASURED

Phrases = dict[str, tuple[str, ...]]
_SCALE = {"K": 3, "M": 6, "B": 9, "T": 12}
_COUNT = re.compile(r"(?<![\w.-])([0-9]+(?:\.[0-9]+)?) ?([KMBT])(?![\w-])")
_LARGEST = re.compile(
    r"largest layer(?: params?| of)? ?[:=]? ?([0-9]+(?:\.[0-9]+)?) ?([KMBT])(?!\w)", re.IGNORECASE | re.ASCII
)
_BYTES = re.compile(r"\bk ?= ?([0-9]+(?:\.[0-9]+)?)")
_OPTION = re.compile(r"([a-z_]+) ?= ?([a-z0-9]+)")


class Unclear(Exception):
    """A row leaves something open, or says it in words that are not known; the message says what."""


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which account answers for rows of a kind from a source: see states.toml."""

    kind: tuple[str, ...]
    source: str
    engine: str
    framework_version: str
    instant: Instant
    reason: str
    cite: str
    url: str = ""
    precision: str = ""
    offloads: tuple[tuple[str, ...], ...] | None = None


class PrecisionWords(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Phrases of `precision` by what they mean."""

    dtype: Phrases
    part: Phrases
    optimizer: Phrases
    flag: Phrases


class QuantityWords(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Phrases of `quantity` by what they mean."""

    category: Phrases
    flag: Phrases
    case: Phrases
    option: dict[str, str]
    setting: Phrases


class Readings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of states.toml."""

    source: tuple[Source, ...]
    precision: PrecisionWords
    quantity: QuantityWords


@lru_cache(maxsize=1)
def readings() -> Readings:
    """How printed states are read."""
    return msgspec.convert(load_toml(MEASURED / "states.toml"), Readings)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dtypes:
    """What `precision` states; "" and None where it is silent. dtype: of the recipe; k: optimizer bytes a parameter."""

    dtype: str = ""
    weights: str = ""
    gradients: str = ""
    master: str = ""
    moments: str = ""
    optimizer: str = ""
    k: Decimal | None = None
    aware: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """What `quantity` asks for: categories (() is all of them), on which side, with what offloaded."""

    categories: tuple[Category, ...] = ()
    host: bool = False
    offload: tuple[str, ...] = ()


def read_precision(text: str) -> Dtypes:
    """The dtypes that a `precision` cell states.

    >>> read_precision("bf16 param, fp32 grads").gradients, read_precision("fp16 mixed, Adam K=12").k
    ('fp32', Decimal('12'))
    """
    words = readings().precision
    kinds = {"dtype": words.dtype, "part": words.part, "optimizer": words.optimizer, "flag": words.flag}
    found: dict[str, str] = {}
    for clause in re.split(r"[,;+/()]|\band\b|\bwith\b", text.lower().replace("`", "")):
        for size in _BYTES.finditer(clause):
            _state(found, "k", size[1], text)
        _read_clause(list(_tokens(_BYTES.sub(" ", clause), kinds, text)), found, text)
    aware = found.pop("aware", "") == "aware"
    k = found.pop("k", None)
    return Dtypes(**found, k=Decimal(k) if k else None, aware=aware)


def _read_clause(tokens: list[tuple[str, str]], found: dict[str, str], text: str) -> None:
    """Pair each dtype with the part it belongs to; a dtype that stands alone is the recipe's."""
    while tokens:
        kind, word = tokens.pop(0)
        after = tokens[0] if tokens else ("", "")
        if kind == "flag":
            if word == "aware":
                _state(found, "aware", word, text)
        elif kind == "optimizer":
            _state(found, "optimizer", word, text)
        elif {kind, after[0]} == {"dtype", "part"}:
            tokens.pop(0)
            dtype, part = (word, after[1]) if kind == "dtype" else (after[1], word)
            _state(found, part, dtype, text)
        elif kind == "dtype":
            _state(found, "dtype", word, text)
        else:
            raise Unclear(f"precision {text!r} names {word} without a dtype")


def _state(found: dict[str, str], what: str, value: str, text: str) -> None:
    if found.setdefault(what, value) != value:
        raise Unclear(f"precision {text!r} states {what} twice, as {found[what]} and as {value}")


def read_quantity(text: str) -> Quantity:
    """What a `quantity` cell asks for.

    >>> read_quantity("per GPU; offload_param=none, offload_optimizer=cpu, zero_init=1").offload
    ('optimizer',)
    """
    words = readings().quantity
    kinds = {"category": words.category, "flag": words.flag, "case": {name: (name,) for name in words.case}}
    categories: list[str] = []
    flags: set[str] = set()
    offload: set[str] = set()
    options = False
    for clause in re.split(r"[,;+()]|\band\b", _LARGEST.sub(" ", text).lower()):
        for option in _OPTION.finditer(clause):
            offload |= _offloaded(option[1], option[2], text)
            options = True
        for kind, word in _tokens(_OPTION.sub(" ", clause), kinds, text, column="quantity"):
            if kind == "category":
                categories.append(word)
            elif kind == "flag":
                flags.add(word)
            else:
                offload.update(words.case[word])
    if text.strip() and not (categories or flags or offload or options):
        raise Unclear(f"quantity {text!r} names neither states nor whose they are")
    chosen = () if set(categories) == {"weights", "gradients", "optimizer"} else tuple(categories)
    return Quantity(
        categories=msgspec.convert(chosen, tuple[Category, ...]),
        host="host" in flags,
        offload=tuple(sorted(offload)),
    )


def _offloaded(option: str, setting: str, text: str) -> set[str]:
    words = readings().quantity
    if option not in words.option:
        raise Unclear(f"quantity {text!r} has the option {option}; known: {', '.join(words.option)}")
    if setting not in (*words.setting["moved"], *words.setting["kept"]):
        values = ", ".join((*words.setting["moved"], *words.setting["kept"]))
        raise Unclear(f"quantity {text!r} sets {option} to {setting}; known: {values}")
    moved = words.option[option]
    return {moved} if moved and setting in words.setting["moved"] else set()


def read_count(text: str) -> int | None:
    """The one parameter count that a `model` cell names, or None.

    >>> read_count("7.5B"), read_count("t5-3b (2851M, largest layer 32M)"), read_count("t5-3b")
    (7500000000, 2851000000, None)
    """
    found = {_elements(match) for match in _COUNT.finditer(_LARGEST.sub(" ", text))}
    return found.pop() if len(found) == 1 else None


def read_largest_layer(text: str) -> int | None:
    """The parameters of the largest layer that a cell names, or None.

    >>> read_largest_layer("t5-3b (2851M, largest layer 32M)")
    32000000
    """
    match = _LARGEST.search(text)
    return _elements(match) if match else None


def _elements(match: re.Match[str]) -> int:
    return int(Decimal(match[1]).scaleb(_SCALE[match[2].upper()]))


def _tokens(
    clause: str, kinds: Mapping[str, Phrases], text: str, *, column: str = "precision"
) -> Iterator[tuple[str, str]]:
    """(kind, meaning) of each known phrase, longest first; anything else is Unclear."""
    meanings = {
        phrase: (kind, meaning)
        for kind, phrases in kinds.items()
        for meaning, spellings in phrases.items()
        for phrase in spellings
    }
    pattern = "|".join(re.escape(phrase) for phrase in sorted(meanings, key=len, reverse=True))
    known = re.compile(rf"(?<![\w.-])(?:{pattern})(?![\w.-])")
    unknown = known.sub(" ", clause).replace("=", " ").replace(":", " ").split()
    if unknown:
        raise Unclear(f"{column} {text!r} has the word {unknown[0]!r}; the words that are read: {_listed(kinds)}")
    for match in known.finditer(clause):
        yield meanings[match[0]]


def _listed(kinds: Mapping[str, Phrases]) -> str:
    """The shortest spelling of each meaning, by kind."""
    return "; ".join(
        f"{kind}: {', '.join(min(spellings, key=len) for spellings in phrases.values())}"
        for kind, phrases in kinds.items()
    )
