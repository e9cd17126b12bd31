"""Phases are charged the time between their start and their end, once."""

from __future__ import annotations

import pytest

from trainledger.runtime.observe.clock import Clock


class Hands:
    """A clock that is moved by hand, and how often the device was waited for."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


def clock_of(hands: Hands) -> Clock:
    clock = Clock(hands.wait, lambda: hands.now)
    clock.measured = True
    return clock


def test_phases_nest_and_add_up() -> None:
    hands = Hands()
    clock = clock_of(hands)
    with clock.phase("step"):
        for forward_s in (1.0, 2.0):
            with clock.phase("forward"):
                assert clock.current == "forward"
                hands.now += forward_s
        assert clock.current == "step"
        hands.now += 4.0
    assert clock.current == "outside"
    assert clock.seconds == {"forward": 3.0, "step": 7.0}
    assert hands.waits == 6


def test_a_phase_within_itself_is_charged_once() -> None:
    hands = Hands()
    clock = clock_of(hands)
    with clock.phase("backward"), clock.phase("forward"), clock.phase("backward"):
        hands.now += 5.0
    assert clock.seconds == {"backward": 5.0, "forward": 5.0}


def test_the_observers_own_time_is_charged_to_no_phase() -> None:
    hands = Hands()
    clock = clock_of(hands)
    with clock.phase("step"), clock.phase("forward"):
        hands.now += 1.0
        with clock.paused():
            hands.now += 10.0
        hands.now += 2.0
    assert clock.seconds == {"step": 3.0, "forward": 3.0}


def test_a_phase_that_raises_ends_and_unmeasured_ones_are_only_named() -> None:
    hands = Hands()
    clock = clock_of(hands)

    def fails() -> None:
        with clock.phase("forward"):
            hands.now += 1.0
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    clock.measured = False
    with clock.phase("backward"):
        hands.now += 1.0
        assert clock.current == "backward"
    assert clock.seconds == {"forward": 1.0}
    assert hands.waits == 2
