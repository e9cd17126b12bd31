"""The order of sequences: the same whoever asks, each sequence once an epoch, and shuffled."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainledger.runtime.data.order import Order

COUNTS = st.integers(1, 700)
SEEDS = st.integers(0, 2**31 - 1)


@given(sequences=COUNTS, seed=SEEDS, epoch=st.integers(0, 10**6))
def test_every_epoch_has_each_sequence_once(sequences: int, seed: int, epoch: int) -> None:
    epoch_order = Order(sequences=sequences, seed=seed).at(epoch * sequences, sequences)
    assert sorted(epoch_order.tolist()) == list(range(sequences))


@given(sequences=COUNTS, seed=SEEDS, first=st.integers(0, 10**9), count=st.integers(0, 300), cut=st.integers(0, 300))
def test_a_place_has_its_sequence_however_it_is_asked_for(
    sequences: int, seed: int, first: int, count: int, cut: int
) -> None:
    order = Order(sequences=sequences, seed=seed)
    cut = min(cut, count)
    parts = [order.at(first, cut), order.at(first + cut, count - cut)]
    assert np.concatenate(parts).tolist() == order.at(first, count).tolist()


def test_the_order_is_that_of_every_release() -> None:
    """Checkpoints keep a place in the order: a release that changed it would read some of an epoch again."""
    order = Order(sequences=10, seed=7)
    assert order.at(0, 20).tolist() == [0, 7, 8, 1, 2, 6, 9, 5, 3, 4, 4, 2, 7, 0, 1, 9, 5, 8, 3, 6]
    assert Order(sequences=10**12, seed=7).at(5 * 10**12, 3).tolist() == [136799555102, 684227036596, 276764810224]


def test_where_a_sequence_comes_is_even_over_epochs_and_over_seeds() -> None:
    """Chi-squared of the first and of the last place; 63 degrees of freedom exceed 110 once in 5000."""
    sequences, draws = 64, 64 * 16
    for place in (0, sequences - 1):
        over_epochs = [Order(sequences=sequences, seed=1).at(e * sequences + place, 1)[0] for e in range(draws)]
        over_seeds = [Order(sequences=sequences, seed=s).at(place, 1)[0] for s in range(draws)]
        for drawn in (over_epochs, over_seeds):
            seen = np.bincount(drawn, minlength=sequences)
            assert ((seen - 16) ** 2 / 16).sum() < 110


def test_what_follows_what_is_not_kept() -> None:
    """In a shuffled order two neighbours of the file stay neighbours about twice, and half of the steps go up."""
    sequences = 10_000
    order = Order(sequences=sequences, seed=3).at(0, sequences)
    steps = np.diff(order)
    assert (np.abs(steps) == 1).sum() < 12
    assert 0.48 < (steps > 0).mean() < 0.52
    assert abs(np.corrcoef(np.arange(sequences), order)[0, 1]) < 0.05


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    orders = {
        tuple(Order(sequences=100, seed=seed).at(epoch * 100, 100).tolist()) for seed in range(4) for epoch in range(4)
    }
    assert len(orders) == 16
