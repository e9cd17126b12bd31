"""The trigram that a trained model is compared with is as good as a trigram can be."""

import numpy as np
import pytest

from trigram import Trigram

VOCAB = 6


def chain(count: int, seed: int = 0) -> tuple[np.ndarray, float]:
    """Tokens of a random second-order Markov chain, and the entropy of a token after its two predecessors."""
    generator = np.random.default_rng(seed)
    rows = generator.dirichlet(np.full(VOCAB, 0.3), size=(VOCAB, VOCAB))
    tokens, entropy = [0, 0], 0.0
    for draw in generator.random(count):
        row = rows[tokens[-2], tokens[-1]]
        tokens.append(int(min(np.searchsorted(row.cumsum(), draw), VOCAB - 1)))
        entropy -= np.log(row[tokens[-1]])
    return np.array(tokens), entropy / count


def test_it_reaches_the_entropy_of_a_chain_that_remembers_two_tokens() -> None:
    tokens, entropy = chain(20_000)
    loss = Trigram(tokens[:15_000], VOCAB).loss(tokens[15_000:]).mean()
    assert loss == pytest.approx(entropy, rel=0.03)


def test_probabilities_of_all_tokens_after_known_ones_sum_to_one() -> None:
    tokens, _ = chain(5_000)
    model = Trigram(tokens, VOCAB)
    for before in ((0, 1), (3, 3), (5, 2)):
        every = [np.exp(-model.loss(np.array([*before, token]))[0]) for token in range(VOCAB)]
        assert sum(every) == pytest.approx(1, abs=1e-3), "but for the last token of all, which nothing follows"


def test_what_two_tokens_do_not_tell_is_left_to_one() -> None:
    """Few tokens of a large vocabulary: trigrams are seldom seen, and get little weight."""
    generator = np.random.default_rng(1)
    model = Trigram(generator.integers(0, 200, 2_000), 200)
    assert model.weights.sum() == pytest.approx(1)
    assert model.weights[3] < 0.05
    assert model.weights[0] + model.weights[1] > 0.9


def test_weights_are_those_under_which_what_was_kept_apart_is_likeliest() -> None:
    tokens, _ = chain(3_000)
    model = Trigram(tokens, VOCAB)
    model._count(tokens[:2_700])
    parts, best = model._parts(tokens[2_700:]), model.weights
    found = np.log(best @ parts).mean()
    for index in range(4):
        for other in range(4):
            moved = best.copy()
            moved[index] = max(moved[index] - 0.01, 0)
            moved[other] += 1 - moved.sum()
            assert np.log(moved @ parts).mean() <= found + 1e-5
