"""What is typed for a flag, as the value of its field: the same for the command line, PLAN files and sweeps."""

from __future__ import annotations

import re
from typing import Literal, get_args, get_origin

from trainledger.errors import UsageError

NONE = "none"
"""Stands for an empty list where a flag takes words from a choice."""

MOST_DIGITS = 100
"""No count has more; a longer one would take time to read."""

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
