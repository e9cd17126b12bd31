"""How much one set of times differs from another, without a word on how times are distributed: intervals from ranks.

Times on a shared machine have long tails and drift, which means and standard deviations follow. What is estimated here
is the shift between two samples, the median of all differences, and its interval has the ends that the exact
distribution of Wilcoxon's statistic gives. [hodges-lehmann: sections 1 and 2]
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from trainledger.arrays import FloatArray


class Shift(msgspec.Struct, frozen=True, kw_only=True):
    """By how much the second sample lies above the first: an estimate, and the ends of its interval."""

    low: float
    estimate: float
    high: float


def paired(differences: Sequence[float], certain: float) -> Shift | None:
    """The shift of pairs, from their differences; None where they are too few for such an interval.

    Its interval has the shift with probability `certain` at least, where differences are as likely to be so much above
    it as below: of two layouts that take turns they are.

    >>> paired([0.9, 1.1, 1.0, 1.2, 0.8, 1.3, 0.7, 1.0], 0.99)
    Shift(low=0.7, estimate=1.0, high=1.3)
    >>> paired([1.0, 1.1, 0.9], 0.99) is None
    True
    """
    found = np.asarray(differences)
    upper = np.triu_indices(len(found))
    averages = np.sort((found[:, None] + found[None, :])[upper] / 2)
    return _between(averages, signed_ranks(len(found)), certain)


def unpaired(first: Sequence[float], second: Sequence[float], certain: float) -> Shift | None:
    """The shift of the second of two independent samples; None where they are too few for such an interval.

    >>> unpaired([1.0, 1.1, 0.9, 1.2, 1.0], [2.0, 2.1, 1.9, 2.2, 2.0], 0.99)
    Shift(low=0.7, estimate=1.0, high=1.3)
    """
    differences = np.sort(np.subtract.outer(np.asarray(second), np.asarray(first)).ravel())
    return _between(differences, rank_sums(len(first), len(second)), certain)


def _between(ordered: FloatArray, counts: FloatArray, certain: float) -> Shift | None:
    """The median of sorted differences, and those between which it lies: `counts` is the distribution of the statistic.

    The statistic is how many of the differences are above the true shift, so leaving out k at either end errs as often
    as it is below k.
    """
    errs = np.cumsum(counts) / counts.sum()
    out = int(np.sum(errs <= (1 - certain) / 2))
    if out == 0:
        return None
    rounded = [round(float(value), 12) for value in (ordered[out - 1], np.median(ordered), ordered[-out])]
    return Shift(low=rounded[0], estimate=rounded[1], high=rounded[2])


def signed_ranks(n: int) -> FloatArray:
    """[n (n+1) / 2 + 1]: in how many of all choices of signs the positive ranks sum to each value.

    >>> signed_ranks(3)
    array([1., 1., 1., 2., 1., 1., 1.])
    """
    counts = np.ones(1)
    for rank in range(1, n + 1):
        grown = np.zeros(len(counts) + rank)
        grown[: len(counts)] += counts
        grown[rank:] += counts
        counts = grown
    return counts


def rank_sums(n: int, m: int) -> FloatArray:
    """[n m + 1]: in how many of all orders of two samples so many pairs have the second one above.

    The coefficients of the Gaussian binomial: each of the n adds a factor (1 - q^(m+i)) / (1 - q^i).

    >>> rank_sums(2, 2)
    array([1., 1., 2., 1., 1.])
    """
    counts = np.zeros(n * m + 1)
    counts[0] = 1.0
    for i in range(1, n + 1):
        for value in range(n * m, m + i - 1, -1):
            counts[value] -= counts[value - m - i]
        for value in range(i, n * m + 1):
            counts[value] += counts[value - i]
    return counts
