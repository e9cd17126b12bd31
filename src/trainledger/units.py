"""Quantities as people write them, read into base units; and base units as people read them.

The only code that knows GB, GiB or Gbit. Inside, a byte count is an int, and a rate, time, power or clock is a
float in bytes per second, operations per second, seconds, watts or hertz.
KB to PB are powers of 1000, KiB to PiB powers of 1024, and a bit is an eighth of a byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Literal, overload

from trainledger.errors import BadInput

Dimension = Literal["byte", "byte_per_s", "flop_per_s", "s", "W", "Hz"]

_DECIMAL = ("", "K", "M", "G", "T", "P")
_BINARY = ("Ki", "Mi", "Gi", "Ti", "Pi")


def _amounts() -> Iterator[tuple[str, Fraction]]:
    """Every unit of an amount of data, in bytes."""
    for power, prefix in enumerate(_DECIMAL):
        yield f"{prefix}B", Fraction(1000**power)
    for power, prefix in enumerate(_BINARY, start=1):
        yield f"{prefix}B", Fraction(1024**power)
    for power, prefix in enumerate(_DECIMAL[:5]):
        yield f"{prefix}bit", Fraction(1000**power, 8)


def _units() -> Iterator[tuple[str, Dimension, Fraction]]:
    """Every unit that can be written: its name, its dimension, its size in the base unit."""
    for name, size in _amounts():
        yield name, "byte", size
        yield f"{name}/s", "byte_per_s", size
    for power, prefix in enumerate(("G", "T", "P"), start=3):
        for operation in ("FLOP", "OP"):
            yield f"{prefix}{operation}/s", "flop_per_s", Fraction(1000**power)
    for power, name in enumerate(("s", "ms", "us")):
        yield name, "s", Fraction(1, 1000**power)
    for power, name in enumerate(("W", "kW")):
        yield name, "W", Fraction(1000**power)
    for power, name in enumerate(("MHz", "GHz"), start=2):
        yield name, "Hz", Fraction(1000**power)


UNITS: dict[str, tuple[Dimension, Fraction]] = {name: (dimension, size) for name, dimension, size in _units()}
"""Unit -> its dimension and its size in that dimension's base unit."""

_QUANTITY = re.compile(r"(-?)([0-9]{1,18}(?:\.[0-9]{1,18})?) ([A-Za-z/]+)")


def _choices(dimension: Dimension | None) -> str:
    """The units to choose from, as a sentence ends with them."""
    if dimension is None:
        return "B, KB, ..., GiB, Gbit, ..., with /s for a rate, TFLOP/s, us, ms, s, W, kW, MHz"
    return ", ".join(name for name, (has, _) in UNITS.items() if has == dimension)


def _split(text: str, dimension: Dimension | None) -> tuple[Fraction, Dimension]:
    """The value in base units, exact, and its dimension."""
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[3] not in UNITS:
        raise BadInput(f"{text!r} is not a quantity: write a number, a space and one of {_choices(dimension)}")
    has, size = UNITS[match[3]]
    if dimension is not None and has != dimension:
        raise BadInput(
            f"{text!r} is in {match[3]}, which does not fit here: write a number, a space and one of "
            f"{_choices(dimension)}"
        )
    if match[1]:
        raise BadInput(f"{text!r} is negative: write the amount without its sign")
    return Fraction(match[2]) * size, has


@overload
def parse_quantity(text: str, dimension: Literal["byte"]) -> int: ...
@overload
def parse_quantity(text: str, dimension: Dimension | None = None) -> int | float: ...
def parse_quantity(text: str, dimension: Dimension | None = None) -> int | float:
    """The quantity in base units: bytes as an int (a part of a byte is dropped), everything else as a float.

    With `dimension`, a quantity of any other dimension is refused.

    >>> parse_quantity("80 GiB"), parse_quantity("400 Gbit/s"), parse_quantity("989.4 TFLOP/s", "flop_per_s")
    (85899345920, 50000000000.0, 989400000000000.0)
    >>> parse_quantity("25 gbps")
    Traceback (most recent call last):
    trainledger.errors.BadInput: '25 gbps' is not a quantity: write a number, a space and one of B, KB, ..., GiB, \
Gbit, ..., with /s for a rate, TFLOP/s, us, ms, s, W, kW, MHz
    """
    value, has = _split(text, dimension)
    return int(value) if has == "byte" else float(value)


def dimension_of(text: str) -> Dimension:
    """The dimension that a quantity has.

    >>> dimension_of("3.35 TB/s")
    'byte_per_s'
    """
    return _split(text, None)[1]


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    """Three significant digits in the largest unit that leaves a number of at least 1."""
    size, step = abs(value), 0
    # 999.6 would be shown as 1000: it belongs to the next unit.
    while size >= base - 0.5 and step < len(units) - 1:
        size, step = size / base, step + 1
    digits = 0 if size >= 99.95 or (step == 0 and float(size).is_integer()) else 1 if size >= 9.995 else 2
    return f"{'-' if value < 0 else ''}{size:.{digits}f} {units[step]}"


def format_bytes(amount: float) -> str:
    """Bytes in powers of 1024, as nvidia-smi and PyTorch count.

    >>> format_bytes(17_609_365_913), format_bytes(0), format_bytes(1023)
    ('16.4 GiB', '0 B', '1023 B')
    """
    return _scaled(amount, 1024, ("B", *(f"{prefix}B" for prefix in _BINARY)))


def format_gb(amount: float) -> str:
    """Bytes in powers of 1000, as name plates and papers count.

    >>> format_gb(120_000_000_000)
    '120 GB'
    """
    return _scaled(amount, 1000, tuple(f"{prefix}B" for prefix in _DECIMAL))


def format_rate(bytes_per_s: float) -> str:
    """Bytes per second in powers of 1000.

    >>> format_rate(3.35e12)
    '3.35 TB/s'
    """
    return f"{format_gb(bytes_per_s)}/s"


def format_flops(flop_per_s: float) -> str:
    """Operations per second.

    >>> format_flops(989.4e12)
    '989 TFLOP/s'
    """
    return _scaled(flop_per_s, 1000, tuple(f"{prefix}FLOP/s" for prefix in (*_DECIMAL, "E")))


def format_count(count: float) -> str:
    """A count (parameters, tokens) to two decimals in thousands, millions, billions (B) or trillions (T).

    >>> format_count(70_553_706_496), format_count(512)
    ('70.55 B', '512')
    """
    size = abs(count)
    for unit, least in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        # 999.996 thousand would be shown as 1000.00 K.
        if size >= least * 0.999995:
            return f"{count / least:.2f} {unit}"
    return f"{count:g}"
