"""Figures as they are printed: their unit, the last digit they show, and whether a computed figure agrees with one.

A printed GB may be 1e9 or 2^30 bytes, so a unit that does not say is not read. Digits are compared exactly: a print
stands for everything within half a unit of its last digit, and for nothing more.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

import msgspec

from trainledger.errors import BadInput
from trainledger.scoring.words import Unclear
from trainledger.units import parse_quantity

_SIZE = re.compile(r"\((?:(1e)([0-9]{1,2})|(2\^)([0-9]{1,2}))\)")
_PER_PARAM = re.compile(r"(?:bytes?|B) ?(?:/|per) ?param(?:eter)?s?", re.IGNORECASE)
_TERM = r"(?:[0-9]+(?:\.[0-9]+)?)?[A-Za-z]{1,2}|[0-9]+(?:\.[0-9]+)?"
_FORMULA = re.compile(rf"(?:{_TERM})(?: ?[-+*/] ?(?:{_TERM}))+")
FORMULA_ONLY = "formula only"
"""What a row says whose source prints its formula elsewhere: in the row's column `formula`."""

MOST_POWER = 30
"""Of ten: no amount of bytes is above 1e30, and no print shows a digit below 1e-30."""

_BINARY = re.compile(r"(?:[KMGTP]iB|B|bytes?)")


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """A unit of bytes: how many one is, and whether it is per parameter; `text` as the row writes it."""

    text: str
    size: int
    per_param: bool = False

    def of(self, amount_bytes: int, num_params: int) -> Fraction:
        """An amount in this unit, exact."""
        return Fraction(amount_bytes, self.size * (num_params if self.per_param else 1))


def read_unit(text: str) -> Unit:
    """The unit that a `unit` cell names; Unclear where it does not say how many bytes it is.

    >>> read_unit("GB printed (2^30)").size, read_unit("bytes/param").per_param
    (1073741824, True)
    """
    size = _SIZE.search(text)
    if size:
        return Unit(text=text, size=10 ** int(size[2]) if size[1] else 1 << int(size[4]))
    if _PER_PARAM.fullmatch(text):
        return Unit(text=text, size=1, per_param=True)
    if _BINARY.fullmatch(text):
        unit = "B" if text.startswith("byte") else text
        return Unit(text=text, size=parse_quantity(f"1 {unit}", "byte"))
    raise Unclear(
        f"unit {text!r} does not say how many bytes it is; write GB (1e9), GB (2^30), GiB, bytes or bytes/param"
    )


def is_formula(text: str) -> bool:
    """Whether a print is a formula in symbols, for which the figure is worked out in another column.

    >>> is_formula("4 + 16/d"), is_formula("12P/Nd + 2P"), is_formula("7.7 / 11.9"), is_formula("50%")
    (True, True, False, False)
    """
    if text == FORMULA_ONLY:
        return True
    plain = text.replace("(", "").replace(")", "")
    digits, letters = (any(test(char) for char in plain) for test in (str.isdigit, str.isalpha))
    return digits and letters and _FORMULA.fullmatch(plain) is not None


def is_plausible(printed: Decimal) -> bool:
    """Whether a print lies between 1e-30 and 1e30, or is 0: beyond, it is no figure and would take memory to compare.

    >>> is_plausible(Decimal("31.4")), is_plausible(Decimal("1e5000")), is_plausible(Decimal("0e-999"))
    (True, False, False)
    """
    return abs(_exponent(printed)) <= MOST_POWER and abs(printed.adjusted()) <= MOST_POWER


def half_unit(printed: Decimal) -> Fraction:
    """Half a unit of the last digit that a number shows.

    >>> half_unit(Decimal("31.4"))
    Fraction(1, 20)
    """
    return Fraction(10) ** _exponent(printed) / 2


def _exponent(printed: Decimal) -> int:
    exponent = printed.as_tuple().exponent
    if not isinstance(exponent, int):
        raise BadInput(f"{printed} is not a number; write digits")
    return exponent


def rounds_to(value: Fraction, printed: Decimal) -> bool:
    """Whether a print shows this value: it lies within half a unit of the last digit, the ends included.

    >>> rounds_to(Fraction("513.5"), Decimal("513")), rounds_to(Fraction("257.75"), Decimal("257"))
    (True, False)
    """
    return abs(value - Fraction(printed)) <= half_unit(printed)


def cut_to(value: Fraction, printed: Decimal) -> bool:
    """Whether a print is this value with the further digits dropped.

    >>> cut_to(Fraction("257.75"), Decimal("257")), cut_to(Fraction("258.1"), Decimal("257"))
    (True, False)
    """
    step = Fraction(10) ** _exponent(printed)
    whole = abs(value) // step * step
    return (whole if value >= 0 else -whole) == Fraction(printed)
