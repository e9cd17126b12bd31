"""Saved activations and the peak of one rank: against what `trainledger prove` has measured, and as they must scale."""

from __future__ import annotations

from typing import Any

import pytest

from trainledger.account.rank import Prediction
from trainledger.account.rank_memory import PEAK, PEAK_TOLERANCE, SAVED, SAVED_TOLERANCE
from trainledger.service.prove import Predictions, check_runtime
from trainledger.service.prove_plan import Planned, planned
from trainledger.service.prove_request import Request

LLAMA, QWEN = "llama-3-8b", "qwen2.5-0.5b"
SHARDED: dict[str, Any] = {"dp": 2, "zero": 3}

WORDS: dict[str, Any] = {
    "set": (
        *("hidden_size=128", "intermediate_size=512", "num_hidden_layers=2", "num_attention_heads=4"),
        *("num_key_value_heads=2", "head_dim=32", "vocab_size=8192"),
    ),
    "full_size": True,
    "seq": 8,
}
"""Of which the step of the largest table takes more than any layer."""

MEASURED: tuple[tuple[str, dict[str, Any], int, int | None, int], ...] = (
    (LLAMA, SHARDED, 0, 465_544, 2_435_428),
    (LLAMA, {"dp": 2, "zero": 2}, 0, 465_544, 2_779_876),
    (LLAMA, {"dp": 2, "zero": 1}, 0, 465_544, 3_017_828),
    (LLAMA, {"dp": 2, "zero": 0}, 0, 465_544, 4_136_540),
    (LLAMA, {**SHARDED, "precision": "bf16"}, 0, 308_872, 2_007_908),
    (LLAMA, {**SHARDED, "precision": "fp8-tensorwise"}, 0, None, 6_655_912),
    (LLAMA, {**SHARDED, "precision": "fp8-rowwise"}, 0, None, 7_043_812),
    (LLAMA, {**SHARDED, "precision": "fp8-forward", "recompute": "full"}, 0, None, 6_716_524),
    (LLAMA, {"tp": 2, "precision": "fp8-rowwise"}, 0, None, 5_814_404),
    (LLAMA, {"precision": "fp8-tensorwise"}, 0, None, 11_154_064),
    (QWEN, {**SHARDED, "precision": "fp8-rowwise"}, 0, None, 26_921_144),
    (LLAMA, {**WORDS, "optimizer": "adamw-8bit"}, 0, None, 81_601_636),
    (LLAMA, {**WORDS, **SHARDED, "optimizer": "adamw-8bit"}, 0, None, 40_817_256),
    (LLAMA, {**WORDS, "dp": 3, "zero": 3, "optimizer": "adamw-8bit"}, 2, None, 27_275_224),
    (LLAMA, {**WORDS, "tp": 2, "optimizer": "adamw-fp8"}, 0, None, 25_577_064),
    (LLAMA, {**SHARDED, "recompute": "full"}, 0, 110_984, 2_258_276),
    (LLAMA, {"tp": 2}, 0, 254_852, 1_726_812),
    (LLAMA, {"tp": 2, **SHARDED}, 0, 255_876, 1_240_460),
    (LLAMA, {"cp": 2}, 0, 240_456, 3_822_756),
    (LLAMA, {"cp": 2}, 1, 232_264, 3_814_564),
    (LLAMA, {"pp": 2, "schedule": "1f1b"}, 0, None, 1_901_360),
    (LLAMA, {"pp": 2, "schedule": "1f1b"}, 1, None, 1_899_208),
    (LLAMA, {"pp": 2, "schedule": "zero-bubble"}, 0, None, 1_909_552),
    (LLAMA, {"pp": 2, "schedule": "zero-bubble"}, 1, None, 2_373_708),
    (QWEN, SHARDED, 0, 977_032, 8_014_328),
    (QWEN, {"dp": 2, "zero": 2}, 0, 977_032, 8_836_472),
    (QWEN, {"dp": 2, "zero": 1}, 0, 977_032, 8_950_936),
    (QWEN, {"dp": 4, "dp_replicate": 2, "zero": 3}, 0, 979_080, 8_371_872),
    ("mixtral-8x7b", SHARDED, 0, 764_576, 6_073_732),
    ("deepseek-v2", SHARDED, 0, 372_168, 1_235_116),
)
"""Model, flags, rank; saved activations (None: not compared) and peak in bytes, as `trainledger prove` saw them."""


def alive(model: str, rank: int = 0, *, dry: bool = False, **flags: Any) -> dict[str, int]:  # noqa: ANN401 - of a Request
    plan = planned(Request(model=model, **flags))
    return {name: amount.amount for name, amount in predicted(plan, rank, dry=dry).alive.items()}


def predicted(plan: Planned, rank: int = 0, *, dry: bool = False) -> Prediction:
    return Predictions(plan, check_runtime(plan)).whole(rank, dry=dry)


@pytest.mark.parametrize(("model", "flags", "rank", "saved", "peak"), MEASURED)
def test_what_is_predicted_was_measured(
    model: str, flags: dict[str, Any], rank: int, saved: int | None, peak: int
) -> None:
    found = alive(model, rank, **flags)
    assert found.keys() == ({PEAK} if "pp" in flags else {SAVED, PEAK})
    assert saved is None or found[SAVED] == pytest.approx(saved, rel=1e-3)
    assert found[PEAK] == pytest.approx(peak, rel=1e-2)


@pytest.mark.parametrize(
    ("flags", "tokens", "element"),
    [
        ({"dp": 2}, 32, 4),
        (SHARDED, 32, 4),
        ({"tp": 2, "dp": 2}, 32, 4),
        ({"cp": 2, "dp": 2}, 16, 4),
        ({**SHARDED, "precision": "bf16"}, 32, 2),
    ],
)
def test_a_second_sequence_keeps_as_much_but_for_what_all_sequences_share(
    flags: dict[str, Any], tokens: int, element: int
) -> None:
    one, two = (alive(LLAMA, mbs=mbs, gbs=2 * mbs, **flags)[SAVED] for mbs in (1, 2))
    tables, loss = 2 * tokens * 8 * element, 2 * 4
    assert 2 * one - two == tables + loss


def test_recomputing_keeps_less_and_what_stops_early_needs_no_more() -> None:
    kept, again = alive(LLAMA, **SHARDED), alive(LLAMA, recompute="full", **SHARDED)
    late = alive(LLAMA, recompute="full", early_stop=False, **SHARDED)
    assert again[SAVED] < kept[SAVED] / 3
    assert again[SAVED] == late[SAVED]
    assert again[PEAK] <= late[PEAK]


def test_each_stage_of_zero_has_less_alive() -> None:
    peaks = [alive(QWEN, dp=4, zero=zero)[PEAK] for zero in range(4)]
    assert peaks == sorted(peaks, reverse=True)
    assert len({*peaks}) == 4


def test_replicas_hold_summed_shards_besides() -> None:
    two, four = (alive(QWEN, dp=4, zero=3, dp_replicate=4 // shard) for shard in (2, 4))
    assert two[SAVED] == four[SAVED]
    assert two[PEAK] > four[PEAK]


def test_requests_of_a_dry_run_hold_nothing() -> None:
    flags: dict[str, Any] = {"pp": 2, "vpp": 2, "schedule": "interleaved", "gbs": 4}
    assert alive(LLAMA, dry=True, **flags)[PEAK] < alive(LLAMA, **flags)[PEAK]


def test_where_a_router_decides_nothing_is_off() -> None:
    plan = planned(Request(model="mixtral-8x7b", dp=2, ep=2, zero=3))
    real, dry = (predicted(plan, dry=dry).alive for dry in (False, True))
    assert {amount.tolerance for amount in real.values()} == {None}
    assert {name: amount.tolerance for name, amount in dry.items()} == {SAVED: SAVED_TOLERANCE, PEAK: PEAK_TOLERANCE}


def test_the_peak_says_where_it_is() -> None:
    found = predicted(planned(Request(model=LLAMA, dp=2))).alive
    assert found[PEAK].basis == found[SAVED].basis == "modelled"
    assert found[PEAK].formula == "most alive: square roots of the step"


def test_a_rank_of_a_full_size_run_is_predicted_from_its_own_shares() -> None:
    """As `trainledger prove` has measured it with the flags of a cell of the proof, dry/llama-3-8b/dp64-zero3."""
    flags: dict[str, Any] = {"dp": 64, "zero": 3, "gbs": 64, "seq": 8192, "precision": "bf16"}
    found = predicted(planned(Request(model=LLAMA, dry=True, full_size=True, **flags)), dry=True).alive
    assert found[PEAK].amount == pytest.approx(71_405_881_492, rel=1e-3)


def test_a_peak_in_fp8_is_judged_where_products_are_emulated() -> None:
    plan = planned(Request(model=LLAMA, precision="fp8-rowwise"))
    rules = check_runtime(plan)
    here, cards = (Predictions(plan, rules, forked=forked).whole(0, dry=False).alive for forked in (True, False))
    assert (here[PEAK].tolerance, cards[PEAK].tolerance) == (PEAK_TOLERANCE, None)
    assert here[SAVED].tolerance == cards[SAVED].tolerance == SAVED_TOLERANCE
