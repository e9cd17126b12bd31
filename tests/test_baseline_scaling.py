"""Efficiency of a ladder, measured and by the ledger, on steps whose times are known."""

from __future__ import annotations

import msgspec
import pytest

from fake_baselines import rung, wrapped
from trainledger.records.record import Rung, Step
from trainledger.records.scaling import communication_s, scaled

ROUNDS = 9


def of(ranks: int, seconds: float, *, work_s: float = 0.004, sums_s: tuple[float, float] = (0.0, 0.0)) -> Rung:
    """A rung of which all steps take as long, but for one round in which everything takes ten times as long."""
    steps = [
        Step(
            round=number,
            step=0,
            seconds=seconds * slower,
            reference_work_s=work_s * slower,
            reference_call_s=sums_s[0] * slower,
            reference_sum_s=sums_s[1] * slower,
        )
        for number in range(ROUNDS)
        for slower in [10.0 if number == 4 else 1.0]
    ]
    return rung(steps, ranks=ranks, tokens=64 * ranks)


def test_efficiency_is_of_the_rung_with_the_fewest_ranks() -> None:
    found = scaled(wrapped("a", of(1, 0.1), of(2, 0.1), of(4, 0.2)))
    assert [one.efficiency for one in found] == pytest.approx([1.0, 1.0, 0.5])
    assert [one.tokens_per_s for one in found] == pytest.approx([640, 1280, 1280])
    assert found[2].efficiency_low == pytest.approx(0.5)
    assert found[2].efficiency_high == pytest.approx(0.5)


def test_a_few_rounds_have_no_interval() -> None:
    few = [msgspec.structs.replace(one, steps=one.steps[:3]) for one in (of(1, 0.1), of(2, 0.1))]
    assert scaled(wrapped("a", *few))[1].efficiency_low is None


def test_the_ledger_says_what_is_sent_at_the_rate_of_the_reference() -> None:
    """Three calls at 1 ms, and a MiB that takes 5 ms less the call: 7 ms beside 100 ms of arithmetic."""
    base, other = of(1, 0.1), of(2, 0.12, sums_s=(0.001, 0.005))
    assert communication_s(base) == 0
    assert communication_s(other) == pytest.approx(0.007)
    low, high = scaled(wrapped("a", base, other))
    assert (low.predicted.exposed, low.predicted.hidden) == pytest.approx((1.0, 1.0))
    assert (high.predicted.exposed, high.predicted.hidden) == pytest.approx((100 / 107, 1.0))


def test_ranks_that_share_cores_are_slower_by_as_much_as_their_reference() -> None:
    _, shared = scaled(wrapped("a", of(1, 0.1), of(2, 0.2, work_s=0.008, sums_s=(0.001, 0.005))))
    assert (shared.predicted.exposed, shared.predicted.hidden) == pytest.approx((100 / 207, 0.5))
    assert shared.efficiency == pytest.approx(0.5)


@pytest.mark.parametrize("call_s", [0.001, 0.5])
def test_the_lowest_rung_is_as_efficient_as_itself(call_s: float) -> None:
    """Also where its reference says that it sends for longer than its step takes."""
    (alone,) = scaled(wrapped("a", of(2, 0.1, sums_s=(call_s, 0.6))))
    assert (alone.predicted.exposed, alone.predicted.hidden) == pytest.approx((1.0, 1.0))
