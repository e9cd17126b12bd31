"""Quantities as written, read into base units, and back as shown."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger.errors import BadInput
from trainledger.units import (
    UNITS,
    dimension_of,
    format_bytes,
    format_count,
    format_flops,
    format_gb,
    format_rate,
    parse_quantity,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 B", 1),
        ("80 GB", 80 * 10**9),
        ("81559 MiB", 85_520_809_984),  # nvidia-smi total of an H100: modal-client pull request 2797 prints both
        ("196592 MiB", 206_141_652_992),  # an MI300X: the HIP query and rocm-smi of two logs agree
        ("1.5 GiB", 3 * 2**29),
        ("79.25 GiB", 317 * 2**28),
        ("0.3 B", 0),  # a part of a byte is dropped
        ("8 Gbit", 10**9),
        ("400 Gbit/s", 50e9),
        ("3.35 TB/s", 3.35e12),
        ("25 GB/s", 25e9),
        ("989.4 TFLOP/s", 989.4e12),
        ("1978.9 TOP/s", 1978.9e12),
        ("9 PFLOP/s", 9e15),
        ("700 W", 700.0),
        ("1.1 kW", 1100.0),
        ("1980 MHz", 1.98e9),
        ("12.9 us", 12.9e-6),
        ("3 ms", 3e-3),
    ],
)
def test_a_quantity_is_its_value_in_base_units(text: str, value: float) -> None:
    assert parse_quantity(text) == value
    assert isinstance(parse_quantity(text), int if dimension_of(text) == "byte" else float)


@pytest.mark.parametrize(
    "text",
    [
        "25 gbps", "25gb", "25GB/s", "25  GB", "GB", "25", "", " 25 GB", "25 GB ", "25 Gb/s", "25 GIB", "25 GiB/S",
        "1e3 GB", "1,000 GB", "1_000 GB", ".5 GB", "5. GB", "+5 GB", "nan GB", "inf W", "25\tGB", "25 GB\n",
        "٢٥ GB", "9" * 5000 + " B", "25 GB per s",
    ],
)  # fmt: off
def test_what_is_not_a_quantity_is_refused_with_the_units_to_choose_from(text: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_quantity(text)
    assert str(caught.value).startswith(f"{text!r} is not a quantity: write a number, a space and one of B, KB, ")


def test_a_quantity_of_another_dimension_is_refused_with_the_units_that_fit() -> None:
    with pytest.raises(BadInput, match=r"'25 GB/s' is in GB/s, which does not fit here: .*one of B, KB, MB.*PiB.*bit"):
        parse_quantity("25 GB/s", "byte")
    with pytest.raises(BadInput, match=r"one of s, ms, us$"):
        parse_quantity("25 GB", "s")
    with pytest.raises(BadInput, match="'-3 GB/s' is negative"):
        parse_quantity("-3 GB/s", "byte_per_s")


@given(st.integers(0, 10**15), st.sampled_from(sorted(UNITS)))
def test_a_whole_number_of_any_unit_is_exact(count: int, unit: str) -> None:
    size = UNITS[unit][1]
    value = parse_quantity(f"{count} {unit}")
    if UNITS[unit][0] == "byte":
        assert value == count * size // 1
    else:
        assert value == float(Fraction(count) * size)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (format_bytes(17_609_365_913), "16.4 GiB"),
        (format_bytes(85_520_809_984), "79.6 GiB"),
        (format_bytes(1023), "1023 B"),
        (format_bytes(1024), "1.00 KiB"),
        (format_bytes(2**20 - 1), "1.00 MiB"),
        (format_bytes(-(2**31)), "-2.00 GiB"),
        (format_gb(999_700_000), "1.00 GB"),
        (format_gb(120e9), "120 GB"),
        (format_rate(3.35e12), "3.35 TB/s"),
        (format_rate(50e9), "50.0 GB/s"),
        (format_flops(989.4e12), "989 TFLOP/s"),
        (format_flops(9e15), "9.00 PFLOP/s"),
        (format_count(70_553_706_496), "70.55 B"),
        (format_count(999_999), "1.00 M"),
        (format_count(999), "999"),
        (format_count(15e12), "15.00 T"),
    ],
)
def test_what_a_reader_sees(shown: str, expected: str) -> None:
    assert shown == expected


@given(st.integers(1, 2**60))
def test_shown_bytes_read_back_within_half_a_percent(amount: int) -> None:
    for shown in (format_bytes(amount), format_gb(amount)):
        assert re.fullmatch(r"\d{1,4}(\.\d{1,2})? [KMGTP]?i?B", shown)
        assert parse_quantity(shown, "byte") == pytest.approx(amount, rel=5e-3)
