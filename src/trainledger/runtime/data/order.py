"""Which sequence is read when: a shuffling of each epoch that is computed and not kept.

The sequences of an epoch are permuted by a Feistel network on the next even number of bits, whose keys come from the
seed and the epoch; a number that falls outside is permuted again until it is inside. [Black and Rogaway 2002, Ciphers
with Arbitrary Finite Domains: cycle walking] So any place of any epoch is found on its own, in no memory, by arithmetic
on 64 bits that no release of a library changes, as numpy may change what its generators draw. The round function is
mix64variant13. [Steele, Lea and Flood 2014, Fast Splittable Pseudorandom Number Generators]
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

ROUNDS = 6
"""Four make a network of random functions as good as a random permutation; ours are short. [Luby and Rackoff 1988]"""

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The order of a run over a file of so many sequences: every epoch has each of them once."""

    sequences: int
    seed: int

    def at(self, first: int, count: int) -> Numbers:
        """Sequence numbers [count] at the positions from `first` on; a position counts all sequences of a run.

        >>> order = Order(sequences=5, seed=0)
        >>> order.at(0, 5), order.at(5, 5)
        (array([4, 0, 3, 2, 1]), array([2, 3, 4, 1, 0]))
        >>> order.at(3, 4)
        array([2, 1, 2, 3])
        """
        positions = np.arange(first, first + count, dtype=np.int64)
        epochs, within = np.divmod(positions, self.sequences)
        numbers = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            numbers[here] = self._permuted(within[here].astype(np.uint64), epoch)
        return numbers

    def _permuted(self, numbers: Words, epoch: int) -> Numbers:
        """Where each number below `sequences` goes in this epoch."""
        half = max(1, ((self.sequences - 1).bit_length() + 1) // 2)
        keys = _keys(self.seed, epoch)
        found = _feistel(numbers, keys, half)
        while (outside := found >= self.sequences).any():
            found[outside] = _feistel(found[outside], keys, half)
        return found.astype(np.int64)


def _keys(seed: int, epoch: int) -> Words:
    """The keys of the rounds [ROUNDS]: seed and epoch each through the mix, so that neighbours share nothing."""
    start = _mixed(_mixed(np.array([seed & _WORD], dtype=np.uint64)) + np.uint64(epoch & _WORD))
    steps = np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return _mixed(start + steps)


def _feistel(numbers: Words, keys: Words, half: int) -> Words:
    """A permutation of the numbers of 2 x `half` bits."""
    width, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = numbers >> width, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right + key) & mask)
    return (left << width) | right


def _mixed(words: Words) -> Words:
    """Each word with all its bits stirred, one to one."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
