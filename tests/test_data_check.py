"""Tokens that a run cannot learn from, or be judged by, are refused by a rule with a name before it starts."""

from pathlib import Path

import msgspec
import pytest

from data_files import spec_of, token_file, tokenizer_json
from trainledger.errors import Refused
from trainledger.runtime.data.check import check_data
from trainledger.runtime.data.tokenizer import open_tokenizer

PLAN = {"mbs": 2, "num_microbatches": 2, "dp_replicate": 2, "dp_shard": 2}
"""A step of 16 sequences."""


def refused(rule: str, *said: str) -> pytest.RaisesExc[Refused]:
    return pytest.raises(Refused, check=lambda error: error.rule == rule and all(part in str(error) for part in said))


def test_tokens_that_fit_pass(tmp_path: Path) -> None:
    spec = spec_of(seq=8, plan=PLAN)
    train = token_file(tmp_path / "train.tokens", [1] * 129)
    held_out = token_file(tmp_path / "held-out.tokens", [2] * 41)
    check_data(spec, train, held_out, eval_sequences=5, tokenizer=open_tokenizer("bytes"))
    check_data(spec, train)


def test_a_step_must_not_see_a_sequence_twice(tmp_path: Path) -> None:
    train = token_file(tmp_path / "train.tokens", [1] * 128)
    with refused("data-length", "has 128 tokens, 15 sequences of 8", "takes 16", "129 tokens or more", "--gbs"):
        check_data(spec_of(seq=8, plan=PLAN), train)


def test_every_token_must_have_a_row_of_the_model(tmp_path: Path) -> None:
    train = token_file(tmp_path / "train.tokens", [1] * 129, vocab_size=257)
    with refused("data-vocabulary", "a vocabulary of 257", "rows for 256", "vocab_size to 257"):
        check_data(spec_of(seq=8, plan=PLAN), train)
    check_data(spec_of(seq=8, vocab_size=257, plan=PLAN), train)
    held_out = token_file(tmp_path / "held-out.tokens", [2] * 41, vocab_size=257)
    with refused("data-vocabulary", "held-out.tokens"):
        check_data(spec_of(seq=8, plan=PLAN), token_file(tmp_path / "narrow.tokens", [1] * 129), held_out)


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    spec, train = spec_of(seq=8, plan=PLAN), token_file(tmp_path / "train.tokens", [1] * 129)
    named = open_tokenizer(str(tokenizer_json(tmp_path / "tokenizer.json")))
    with refused("data-tokenizer", "was made by the tokenizer bytes, and the run names", named.digest):
        check_data(spec, train, tokenizer=named)
    held_out = token_file(tmp_path / "held-out.tokens", [2] * 41)
    other = msgspec.structs.replace(held_out, facts=msgspec.structs.replace(held_out.facts, tokenizer="0a1b"))
    with refused("data-tokenizer", "was made by the tokenizer 0a1b and", "prepare both with one"):
        check_data(spec, train, other)


def test_a_run_is_not_judged_by_what_it_learned(tmp_path: Path) -> None:
    train = token_file(tmp_path / "train.tokens", [1] * 129)
    copy = token_file(tmp_path / "copy.tokens", [1] * 129)
    with refused("data-held-out", "has the tokens of"):
        check_data(spec_of(seq=8, plan=PLAN), train, copy)


@pytest.mark.parametrize(("count", "wanted", "said"), [(8, 0, "takes at least 1"), (40, 5, "has 4 sequences of 8")])
def test_an_evaluation_needs_its_sequences(tmp_path: Path, count: int, wanted: int, said: str) -> None:
    train = token_file(tmp_path / "train.tokens", [1] * 129)
    held_out = token_file(tmp_path / "held-out.tokens", [2] * count)
    with refused("data-held-out", said):
        check_data(spec_of(seq=8, plan=PLAN), train, held_out, eval_sequences=wanted)
