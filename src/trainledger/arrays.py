"""Integer arithmetic on arrays of plans: exact, without overflow."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


def ints(values: object) -> IntArray:
    """An int64 array of at least one dimension."""
    return np.atleast_1d(np.asarray(values, dtype=np.int64))


def first_that(holds: Callable[[int], bool], count: int) -> int:
    """The least index below `count` that holds, where every later one does too; `count` where none does.

    It is looked for near the start: the step doubles until one holds, and what was passed over is halved.

    >>> asked = []
    >>> first_that(lambda index: not asked.append(index) and index >= 6, 1000), asked
    (6, [0, 1, 3, 7, 5, 6])
    """
    below, above = -1, 0
    while above < count and not holds(above):
        below, above = above, 2 * above + 1
    between = range(below + 1, min(above, count))
    return below + 1 + bisect_left(between, True, key=holds)


def ceil_div(amount: IntArray | int, over: IntArray | int) -> IntArray:
    """The smallest integer not below amount / over.

    >>> ceil_div(np.array([7, 8]), 4)
    array([2, 2])
    """
    return -(-amount // over)  # type: ignore[return-value]  # an array wherever either is one


def round_up(amount: IntArray | int, multiple: IntArray | int) -> IntArray:
    """The smallest multiple of `multiple` not below `amount`.

    >>> round_up(np.array([1, 128]), 128)
    array([128, 128])
    """
    return ceil_div(amount, multiple) * multiple


def divisors(number: int) -> list[int]:
    """All divisors of a positive integer, in order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def one_of(column: IntArray, chosen: tuple[int, ...], size: int) -> NDArray[np.bool_]:
    """Where a column of small integers (0 to size - 1) holds one of the chosen ones.

    A table look-up: for a single plan it is a tenth of numpy.isin's time.

    >>> one_of(np.array([0, 3, 1]), (1, 3), 4).tolist()
    [False, True, True]
    """
    return _membership(chosen, size)[column]


@lru_cache(maxsize=64)
def _membership(chosen: tuple[int, ...], size: int) -> NDArray[np.bool_]:
    table = np.zeros(size, dtype=np.bool_)
    table[list(chosen)] = True
    return table


def stacked(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Arrays [n, rows] one under the other, the narrower ones filled up with zeros.

    >>> stacked([np.array([[1, 2]]), np.array([[3]])]).tolist()
    [[1, 2], [3, 0]]
    """
    widest = max(part.shape[1] for part in parts)
    whole = np.zeros((sum(len(part) for part in parts), widest), dtype=parts[0].dtype)
    start = 0
    for part in parts:
        whole[start : start + len(part), : part.shape[1]] = part
        start += len(part)
    return whole
