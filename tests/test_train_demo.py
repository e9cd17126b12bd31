"""The runs of examples/: legal as they stand, and better than a trigram of the same tokens, in every recipe."""

import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from trainledger.runtime.data import TokenFile, prepare
from trainledger.service import train
from trainledger.service.train_plan import ready
from trainledger.service.train_request import Request
from trigram import Trigram

EXAMPLES = Path(__file__).parent.parent / "examples"
ALONE, FP8, FORWARD = "tiny.toml", "tiny-zero3-fp8.toml", "tiny-zero3-fp8-forward.toml"
TRIGRAM = 2.048
"""Nats a byte on the held-out tenth."""
BELOW = 0.95
"""What a trained model reaches, as a share of that, or less."""
CLOSE = 0.02
"""A recipe changes the held-out loss of fp32 by no more than this share."""
DEMO_S = 180
"""Four ranks on two cores."""


@cache
def trigram_loss(train_tokens: Path, held_out: Path, seq: int) -> float:
    """Mean loss of a trigram of the one on the labels that a run is judged by in the other."""
    known, judged = (TokenFile.open(path).tokens().astype(np.int64) for path in (train_tokens, held_out))
    model = Trigram(known, TokenFile.open(train_tokens).facts.vocab_size)
    # the first label of all has one token before it
    return float(model.loss(judged[: (len(judged) - 1) // seq * seq + 1]).mean())


def test_the_trigram_of_the_text_is_a_good_one(tmp_path: Path) -> None:
    made = prepare([EXAMPLES / "data" / "tinyshakespeare.txt"], "bytes", tmp_path / "tokens", held_out=0.1)
    assert made.held_out is not None
    assert trigram_loss(made.train.path, made.held_out.path, 64) == pytest.approx(TRIGRAM, abs=1e-3)


@pytest.mark.parametrize("name", [ALONE, FP8, FORWARD])
def test_a_run_is_legal_as_it_stands(tmp_path: Path, name: str) -> None:
    one = ready(Request(model=str(EXAMPLES / name), out=str(tmp_path / "run")))
    run = one.spec.run
    assert 1e6 <= run.model.total_params < 3e6
    assert run.model.vocab_size == TokenFile.open(Path(one.spec.data.train)).facts.vocab_size == 256
    assert run.sequences_per_step * run.seq * run.steps < 500_000, "half an epoch"


def test_the_runs_differ_in_layout_and_recipe_alone(tmp_path: Path) -> None:
    alone, fp8, forward = (
        ready(Request(model=str(EXAMPLES / name), out=str(tmp_path / name))).spec for name in (ALONE, FP8, FORWARD)
    )
    assert (alone.run.precision, fp8.run.precision, forward.run.precision) == ("fp32", "fp8-tensorwise", "fp8-forward")
    assert fp8.plan == forward.plan
    assert (fp8.plan["dp_shard"], fp8.plan["zero_stage"]) == (4, 3)
    for other in (fp8, forward):
        assert other.run.sequences_per_step == alone.run.sequences_per_step
        for key in ("learning_rate", "weight_decay", "seed", "steps", "seq", "optimizer"):
            assert getattr(other.run, key) == getattr(alone.run, key), key
        assert (other.warmup_steps, other.min_learning_rate) == (alone.warmup_steps, alone.min_learning_rate)


def trained(name: str, folder: Path, precision: str | None = None) -> tuple[train.Response, float, float]:
    """What became of a run, the loss of a trigram on the same tokens, and how long it took."""
    begin = time.monotonic()
    request = Request(model=str(EXAMPLES / name), out=str(folder / "run"), precision=precision)
    response = train.run(request)
    took_s = time.monotonic() - begin
    tokens = folder / "run" / "tokens"
    (made,) = tokens.rglob("train.tokens")
    return response, trigram_loss(made, made.with_name("held-out.tokens"), 64), took_s


@pytest.mark.proof
@pytest.mark.parametrize("name", [FP8, FORWARD])
def test_four_ranks_in_fp8_beat_a_trigram_in_three_minutes(tmp_path: Path, name: str) -> None:
    response, trigram, took_s = trained(name, tmp_path)
    assert response.gemms.fp8_gemms > 0
    assert response.held_out_loss is not None
    assert response.held_out_loss < BELOW * trigram
    assert took_s < DEMO_S


@pytest.mark.proof
def test_every_recipe_ends_where_fp32_ends(tmp_path: Path) -> None:
    losses: dict[str, float] = {}
    for precision in ("fp32", "bf16", "fp16", "fp8-tensorwise", "fp8-rowwise", "fp8-forward"):
        response, trigram, _ = trained(ALONE, tmp_path / precision, precision)
        assert response.held_out_loss is not None
        assert response.held_out_loss < BELOW * trigram
        losses[precision] = response.held_out_loss
    for precision, loss in losses.items():
        assert abs(loss / losses["fp32"] - 1) < CLOSE, (precision, losses)
