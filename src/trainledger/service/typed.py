"""What is typed for a flag, as the value of its field: the same for the command line, PLAN files and sweeps."""

from __future__ import annotations

import math
import re
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

import msgspec

from trainledger.errors import BadInput, UsageError

Request = TypeVar("Request", bound=msgspec.Struct)

NONE = "none"
"""Stands for an empty list where a flag takes words from a choice."""

MOST_DIGITS = 100
"""No count has more; a longer one would take time to read."""

_AT = re.compile(r" - at `\$\.?(.*)`$")
_NUMBER = re.compile(r"[+-]?[0-9]{1,30}(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,2})?")
_LONGER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WHOLE = re.compile(r"[+-]?[0-9]+")


def whole_number(flag: str, text: str, such_as: str) -> int:
    """The whole number that is typed for a flag: digits with a sign or without, and nothing else.

    >>> whole_number("--gpus", "64", "64"), whole_number("--tp", "-2", "8")
    (64, -2)
    >>> whole_number("--mbs", "1.5", "2")
    Traceback (most recent call last):
    trainledger.errors.UsageError: --mbs: '1.5' is not a whole number; write digits, such as 2
    """
    if not _WHOLE.fullmatch(text):
        raise UsageError(f"{flag}: {text!r} is not a whole number; write digits, such as {such_as}")
    if len(text) > MOST_DIGITS:
        raise UsageError(f"{flag}: a number of {len(text)} digits is beyond any count; write fewer, such as {such_as}")
    return int(text)


def number(flag: str, text: str) -> float:
    """The number that is typed for a flag: digits, perhaps with a point and an exponent.

    >>> number("--clip-norm", "0.5"), number("--clip-norm", "1e-2")
    (0.5, 0.01)
    >>> number("--clip-norm", "nan")
    Traceback (most recent call last):
    trainledger.errors.UsageError: --clip-norm: 'nan' is not a number; write one such as 1.0
    """
    if _NUMBER.fullmatch(text) is None and _LONGER.fullmatch(text) is not None:
        raise UsageError(
            f"{flag}: {text[:MOST_DIGITS]!r} has more than 30 digits on a side, or an exponent of more than two; write "
            "one such as 1.0"
        )
    if not _NUMBER.fullmatch(text):
        raise UsageError(f"{flag}: {text[:MOST_DIGITS]!r} is not a number; write one such as 1.0")
    return float(text)


def items(flag: str, element: object, text: str, shown: str) -> tuple[int | str, ...]:
    """What is typed with commas, part by part; `element` is the type of one, `shown` how the help writes the flag.

    >>> items("--pp-layout", int, "9,8, 8,7", "N,N,...")
    (9, 8, 8, 7)
    >>> items("--offload", Literal["optimizer", "parameters"], "none", "WHAT,...")
    ()
    """
    if get_origin(element) is Literal and text.strip() == NONE:
        return ()
    return tuple(item(flag, element, part.strip(), shown) for part in text.split(","))


def item(flag: str, element: object, part: str, shown: str) -> int | str:
    """One part of a list."""
    if element is int:
        return whole_number(flag, part, "9,8,8,7")
    if get_origin(element) is Literal and part not in get_args(element):
        raise UsageError(f"{flag}: {part!r} is not one of {', '.join((*get_args(element), NONE))}")
    if not part:
        raise UsageError(f"{flag}: a value is empty; write {shown}")
    return part


def request_from(kind: type[Request], values: dict[str, Any], where: str) -> Request:
    """A Request from values by flag, without its dashes; a wrong type is refused with what fits.

    A list may be the text that the command line takes, with commas.
    """
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for key, value in values.items():
        _refuse_unwritable(where, key, value)
    try:
        return msgspec.convert({key: _listed(fields[key], value) for key, value in values.items()}, kind)
    except UsageError as error:
        raise BadInput(f"{where}: {error}") from None
    except msgspec.ValidationError as error:
        raise BadInput(f"{where}: {_complaint(str(error), values, kind)}") from None


def _refuse_unwritable(where: str, key: str, value: object) -> None:
    """What a TOML file may have and no one can type for a flag: infinite numbers, nan, and the character zero."""
    if isinstance(value, list):
        for part in cast("list[object]", value):
            _refuse_unwritable(where, key, part)
    elif isinstance(value, float) and not math.isfinite(value):
        raise BadInput(f"{where}: {key} is {value}: it must be a finite number; write one such as 1.0")
    elif isinstance(value, str) and "\0" in value:
        raise BadInput(f"{where}: {key} is {value!r}: no name has the character zero; leave it out")


def _listed(field: msgspec.structs.FieldInfo, value: object) -> object:
    """The value of a field; where that is a list, text is taken apart."""
    hint, meta = get_args(field.type)
    parts = [part for part in get_args(hint) if get_origin(part) is tuple]
    if not parts or not isinstance(value, str):
        return value
    if meta.extra["repeat"]:
        return [value]
    return list(items(field.encode_name, get_args(parts[0])[0], value, meta.extra["value"]))


def _complaint(message: str, values: dict[str, Any], kind: type[msgspec.Struct]) -> str:
    """The message of msgspec with the flag in front, the value that was seen, and the words that would do.

    >>> from trainledger.service.requests import RunRequest
    >>> _complaint("Expected `int | null`, got `str` - at `$.gpus`", {"gpus": "many"}, RunRequest)
    "gpus is 'many': expected `int`, got `str`"
    >>> _complaint("Invalid enum value 'cpu' - at `$.offload[0]`", {"offload": ["cpu"]}, RunRequest)
    "offload is ['cpu']: invalid enum value 'cpu'; write optimizer or parameters or activations"
    """
    where = _AT.search(message)
    key = where[1].partition("[")[0] if where else ""
    text = _AT.sub("", message).replace(" | null", "")
    words = " or ".join(_choices(key, kind)) if text.startswith("Invalid enum") else ""
    return f"{key} is {values.get(key)!r}: {text[0].lower()}{text[1:]}{f'; write {words}' if words else ''}"


def _choices(key: str, kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """The words that a flag may be, or its items."""
    hints = [field.type for field in msgspec.structs.fields(kind) if field.encode_name == key]
    while hints:
        hint = hints.pop()
        if get_origin(hint) is Literal:
            return get_args(hint)
        hints += [part for part in get_args(hint) if get_args(part)]
    return ()
