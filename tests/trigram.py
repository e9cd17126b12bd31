"""An interpolated trigram model of tokens: what any network must beat to have learned more than short memory.

p(c | a, b) = w3 n(abc)/n(ab) + w2 n(bc)/n(b) + w1 n(c)/n + w0/V, with weights by expectation maximisation on tokens
that are counted only afterwards. [Jelinek and Mercer 1980, Interpolated estimation of Markov source parameters from
sparse data] Where a context was never seen its share is zero, and the weights are what they are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

TUNED_ON = 0.1
"""The share of the tokens, their end, that the weights are tuned on."""
ROUNDS = 100


class Counted(NamedTuple):
    """How often each key was seen; keys in order."""

    keys: Ints
    counts: Ints

    def of(self, keys: Ints) -> Ints:
        """The counts of these keys, 0 where one was never seen."""
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[at] == keys, self.counts[at], 0)


class Trigram:
    """Counts of tokens [count] below `vocab_size`, and the weights [uniform, one, two, three tokens]."""

    def __init__(self, tokens: Ints, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        known = round(len(tokens) * (1 - TUNED_ON))
        self._count(tokens[:known])
        self.weights = _tuned(self._parts(tokens[known:]))
        self._count(tokens)

    def loss(self, tokens: Ints) -> Floats:
        """-log p of each token [count - 2] after its two predecessors, in nats."""
        return -np.log(self.weights @ self._parts(tokens))

    def _count(self, tokens: Ints) -> None:
        self._grams = [Counted(*np.unique(keys, return_counts=True)) for keys in self._keys(tokens)]

    def _keys(self, tokens: Ints) -> list[Ints]:
        """One, two and three tokens in a row, each row as one number."""
        base, keys = self._vocab_size, [tokens]
        for ahead in (1, 2):
            keys.append(keys[-1][:-1] * base + tokens[ahead:])
        return keys

    def _parts(self, tokens: Ints) -> Floats:
        """What each of the four says of every token but the first two [4, count - 2]."""
        one, two, three = (gram.of(keys) for gram, keys in zip(self._grams, self._keys(tokens), strict=True))
        total = self._grams[0].counts.sum()
        uniform = np.full(len(tokens) - 2, 1 / self._vocab_size)
        return np.stack([uniform, one[2:] / total, two[1:] / np.maximum(one[1:-1], 1), three / np.maximum(two[:-1], 1)])


def _tuned(parts: Floats) -> Floats:
    """Weights that make these tokens likeliest [4]."""
    weights = np.full(len(parts), 1 / len(parts))
    for _ in range(ROUNDS):
        shares = parts * weights[:, None]
        weights = (shares / shares.sum(axis=0)).mean(axis=1)
    return weights
