"""Intervals from ranks: exact for small samples, and true as often as they say, whatever the noise looks like."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from trainledger.records.noise import paired, rank_sums, signed_ranks, unpaired


@pytest.mark.parametrize("n", range(1, 8))
def test_signed_ranks_are_those_of_all_signs(n: int) -> None:
    signs = itertools.product((0, 1), repeat=n)
    counted = Counter(sum(rank for rank, sign in enumerate(one, start=1) if sign) for one in signs)
    assert signed_ranks(n).tolist() == [counted[value] for value in range(n * (n + 1) // 2 + 1)]


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 3), (3, 3), (4, 5), (5, 3)])
def test_rank_sums_are_those_of_all_orders(n: int, m: int) -> None:
    counted: Counter[int] = Counter()
    for first in itertools.combinations(range(n + m), n):
        second = [place for place in range(n + m) if place not in first]
        counted[sum(x < y for x in first for y in second)] += 1
    assert rank_sums(n, m).tolist() == [counted[value] for value in range(n * m + 1)]


def test_too_few_say_nothing() -> None:
    """Of seven pairs all are positive once in 64 times, twice what an interval of 99 % may miss."""
    assert paired([1.0] * 7, 0.99) is None
    assert paired([1.0] * 8, 0.99) is not None
    assert unpaired([0.0] * 4, [1.0] * 4, 0.99) is None
    assert unpaired([0.0] * 5, [1.0] * 5, 0.99) is not None


@pytest.mark.parametrize("kind", ["cauchy", "exponential"])
def test_the_shift_lies_within_as_often_as_is_said(kind: str) -> None:
    """Of 1000 intervals of 95 %, 950 on average: 929 are 3 standard deviations below."""
    draw, times, held = np.random.default_rng(7), 1000, Counter[str]()

    def noise(n: int) -> np.ndarray:
        return draw.standard_cauchy(n) if kind == "cauchy" else draw.exponential(size=n)

    for _ in range(times):
        first, second = noise(8), noise(8) + 0.3
        apart = unpaired(first.tolist(), second.tolist(), 0.95)
        pairs = paired((noise(8) + 0.3 - noise(8)).tolist(), 0.95)
        assert apart is not None
        assert pairs is not None
        held["apart"] += apart.low <= 0.3 <= apart.high
        held["pairs"] += pairs.low <= 0.3 <= pairs.high
    assert min(held.values()) >= 929


def test_a_wild_value_does_not_move_the_estimate() -> None:
    calm = [0.1, 0.11, 0.09, 0.1, 0.12, 0.08, 0.1, 0.11, 0.09, 0.1]
    wild = [*calm[:-1], 50.0]
    found = paired(wild, 0.99)
    assert found is not None
    assert found.estimate == pytest.approx(0.1, abs=0.01)
