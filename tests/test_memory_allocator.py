"""The model of the caching allocator: each rule on a scenario worked by hand, and all of them against a plain model."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger.account.memory.reserved.allocator import Event, replay

MIB = 1 << 20
BOTH = pytest.mark.parametrize("expandable", [False, True])


def alloc(name: int, mib: float, stream: int = 0) -> Event:
    return ("alloc", name, int(mib * MIB), stream)


def free(name: int) -> Event:
    return ("free", name, 0, 0)


def mib(events: list[Event], *, expandable: bool = False, limit: int | None = None) -> tuple[float, float]:
    """(allocated, reserved) at their most, in MiB."""
    got = replay(events, expandable=expandable, limit_bytes=None if limit is None else limit * MIB)
    return got.max_allocated / MIB, got.max_reserved / MIB


@BOTH
def test_a_request_takes_whole_units_and_a_small_one_a_segment_of_two_mib(expandable: bool) -> None:
    got = replay([("alloc", 0, 1, 0), ("alloc", 1, 513, 0)], expandable=expandable)
    assert (got.max_allocated, got.max_reserved) == (512 + 1024, 2 * MIB)


@BOTH
def test_no_bytes_take_no_block(expandable: bool) -> None:
    assert mib([alloc(0, 0), free(0)], expandable=expandable) == (0, 0)


@BOTH
def test_small_requests_share_segments_up_to_one_mib(expandable: bool) -> None:
    assert mib([alloc(0, 1), alloc(1, 1)], expandable=expandable) == (2, 2)
    assert mib([alloc(0, 1), alloc(1, 1), alloc(2, 0.5)], expandable=expandable) == (2.5, 4)


@BOTH
def test_a_large_request_never_takes_what_small_ones_left(expandable: bool) -> None:
    just_above = 1 + 512 / MIB
    assert mib([alloc(0, 1), free(0), alloc(1, just_above)], expandable=expandable)[1] == 2 + 20


def test_requests_below_ten_mib_are_cut_from_twenty() -> None:
    assert mib([alloc(0, 9), alloc(1, 9)]) == (18, 20)
    assert mib([alloc(0, 9), alloc(1, 9), alloc(2, 9)]) == (27, 40)


def test_requests_from_ten_mib_on_get_segments_of_their_own_in_steps_of_two() -> None:
    assert mib([alloc(0, 10)])[1] == 10
    assert mib([alloc(0, 10), alloc(1, 10.5)])[1] == 10 + 12


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    made = [alloc(0, 30), alloc(1, 20), alloc(2, 26), free(0), free(1), free(2)]
    # 22 out of 26: 28 still fits into 30
    assert mib([*made, alloc(3, 22), alloc(4, 28)])[1] == 76
    # 27 out of 30: what is left of it is too small for 28
    assert mib([*made, alloc(3, 27), alloc(4, 28)])[1] == 76 + 28


def test_a_remainder_of_up_to_one_mib_stays_with_a_large_block() -> None:
    whole = [alloc(0, 30), free(0)]
    assert mib([*whole, alloc(1, 29)])[0] == 30
    assert replay([*whole, alloc(1, 29), free(1), alloc(2, 30)], expandable=False).max_reserved == 30 * MIB
    # allocated says so: the block in use is all of it
    assert mib([alloc(0, 11), alloc(1, 3)])[0] == 12 + 3


def test_a_remainder_above_one_mib_is_free_for_others() -> None:
    assert mib([alloc(0, 30), free(0), alloc(1, 28), alloc(2, 2)])[1] == 30


def test_an_expandable_segment_leaves_nothing_with_a_block() -> None:
    assert mib([alloc(0, 30), free(0), alloc(1, 29), alloc(2, 10.5)], expandable=True) == (39.5, 40)


def test_free_neighbours_become_one_block() -> None:
    made = [alloc(0, 6), alloc(1, 6), alloc(2, 6)]
    assert mib([*made, free(0), free(2), free(1), alloc(3, 19)])[1] == 20
    assert mib([*made, free(0), free(2), alloc(3, 9)])[1] == 40


def test_segments_do_not_become_one_unless_they_expand() -> None:
    events = [alloc(0, 10), alloc(1, 10), free(0), free(1), alloc(2, 20)]
    assert mib(events)[1] == 40
    assert mib(events, expandable=True)[1] == 20


@BOTH
def test_what_a_stream_freed_serves_that_stream_alone(expandable: bool) -> None:
    events = [alloc(0, 20, stream=1), free(0), alloc(1, 20, stream=2), alloc(2, 20, stream=1)]
    got = replay(events, expandable=expandable)
    assert got.max_reserved == 40 * MIB
    assert (got.of_stream(1), got.of_stream(2), got.of_stream(3)) == (20 * MIB, 20 * MIB, 0)


def test_an_expandable_segment_grows_by_pages_from_what_is_free_at_its_end() -> None:
    # 30 takes two pages; 15 takes the 10 that are left and one more page
    assert mib([alloc(0, 30), alloc(1, 15)], expandable=True) == (45, 60)


def test_the_block_at_the_end_of_an_expandable_segment_is_taken_last() -> None:
    # free: 14 in the middle, 12 at the end. 11 would fit the end better, and goes into the middle, so 25 needs 13 more
    made = [alloc(0, 14), alloc(1, 14), free(0), alloc(2, 11)]
    got = replay([*made, alloc(3, 25)], expandable=True)
    assert got.max_reserved == 60 * MIB


def test_a_full_device_gives_back_whole_free_segments_first() -> None:
    events = [alloc(0, 30), alloc(1, 30), free(0), alloc(2, 40)]
    assert mib(events) == (70, 100)
    got = replay(events, expandable=False, limit_bytes=80 * MIB)
    assert (got.max_reserved, got.refused) == (70 * MIB, 0)


def test_a_segment_that_is_partly_in_use_is_not_given_back() -> None:
    got = replay([alloc(0, 30), free(0), alloc(1, 10), alloc(2, 25)], expandable=False, limit_bytes=50 * MIB)
    assert (got.max_allocated, got.max_reserved, got.refused) == (30 * MIB, 30 * MIB, 25 * MIB)


def test_pages_in_which_nothing_is_in_use_are_given_back_and_mapped_again() -> None:
    # 10 | 60 free | 10: pages of 20 MiB, of which the two in the middle hold nothing
    made = [alloc(0, 10), alloc(1, 60), alloc(2, 10), free(1)]
    other = replay([*made, alloc(3, 40, stream=1)], expandable=True, limit_bytes=80 * MIB)
    assert (other.refused, other.max_reserved) == (0, 80 * MIB)
    assert other.of_stream(0) == other.of_stream(1) == 40 * MIB
    # and 60 in one piece need them back, which is too much, unless the other stream lets go
    again = [*made, alloc(3, 40, stream=1), alloc(4, 60)]
    assert replay(again, expandable=True, limit_bytes=80 * MIB).refused == 60 * MIB
    again.insert(-1, free(3))
    back = replay(again, expandable=True, limit_bytes=80 * MIB)
    assert (back.refused, back.of_stream(0), back.of_stream(1)) == (0, 80 * MIB, 0)


@BOTH
def test_a_request_that_no_room_is_left_for_ends_the_replay(expandable: bool) -> None:
    got = replay([alloc(0, 40), alloc(1, 41), alloc(2, 1)], expandable=expandable, limit_bytes=80 * MIB)
    assert (got.max_allocated, got.max_reserved, got.refused) == (40 * MIB, 40 * MIB, 41 * MIB)


@dataclasses.dataclass
class Block:
    size: int
    used: int | None = None
    mapped: bool = True


class Plain:
    """The rules without an index: each segment a list of blocks, every question a scan over all of them."""

    def __init__(self, *, expandable: bool) -> None:
        self.expandable = expandable
        self.segments: dict[tuple[int, bool], list[list[Block]]] = {}

    def alloc(self, name: int, nbytes: int, stream: int) -> None:
        size = -(-nbytes // 512) * 512
        small = size <= MIB
        segments = self.segments.setdefault((stream, small), [])
        fits = [
            (self._as_large_as(line, i), order, i, line)
            for order, line in enumerate(segments)
            for i, block in enumerate(line)
            if block.used is None and block.mapped and block.size >= size
        ]
        _, _, at, line = min(fits, key=lambda fit: fit[:3]) if fits else self._new(segments, size, small=small)
        block = line[at]
        rest = block.size - size
        if rest > (0 if small or self.expandable else MIB):
            line.insert(at + 1, Block(rest))
            block.size = size
        block.used = name

    def _as_large_as(self, line: list[Block], i: int) -> int:
        at_end = self.expandable and i == len(line) - 1
        return line[i].size + at_end * (1 << 60)

    def _new(self, segments: list[list[Block]], size: int, *, small: bool) -> tuple[int, int, int, list[Block]]:
        step = (2 if small else 20) * MIB
        if not self.expandable:
            whole = step if small or size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            segments.append([Block(whole)])
            return 0, 0, 0, segments[-1]
        if not segments:
            segments.append([])
        line = segments[0]
        if not line or line[-1].used is not None:
            line.append(Block(0))
        line[-1].size += -(-(size - line[-1].size) // step) * step
        return 0, 0, len(line) - 1, line

    def free(self, name: int) -> None:
        for line in (line for segments in self.segments.values() for line in segments):
            for block in line:
                block.used = None if block.used == name else block.used
            i = 0
            while i + 1 < len(line):
                if line[i].used is None and line[i + 1].used is None:
                    line[i].size += line.pop(i + 1).size
                else:
                    i += 1

    def bytes(self, *, used: bool) -> int:
        blocks = (b for segments in self.segments.values() for line in segments for b in line)
        return sum(block.size for block in blocks if block.used is not None or not used)


@st.composite
def requests(draw: st.DrawFn) -> list[Event]:
    sizes = st.one_of(st.integers(0, 3 * MIB), st.sampled_from([2 * MIB, 9 * MIB, 10 * MIB, 24 * MIB, 33 * MIB + 1]))
    events: list[Event] = []
    alive: list[int] = []
    for name in range(draw(st.integers(1, 40))):
        if alive and draw(st.booleans()):
            events.append(free(alive.pop(draw(st.integers(0, len(alive) - 1)))))
        events.append(("alloc", name, draw(sizes), draw(st.integers(0, 1))))
        alive.append(name)
    return events + [free(name) for name in alive] if draw(st.booleans()) else events


@BOTH
@given(events=requests())
def test_the_model_agrees_with_the_plain_one(expandable: bool, events: list[Event]) -> None:
    plain = Plain(expandable=expandable)
    allocated = reserved = 0
    for op, name, nbytes, stream in events:
        if op == "alloc":
            if nbytes:
                plain.alloc(name, nbytes, stream)
        else:
            plain.free(name)
        allocated = max(allocated, plain.bytes(used=True))
        reserved = max(reserved, plain.bytes(used=False))
    got = replay(events, expandable=expandable)
    assert (got.max_allocated, got.max_reserved) == (allocated, reserved)


@BOTH
@given(events=requests(), limit=st.integers(20, 200))
def test_a_limit_is_kept_and_costs_nothing_while_there_is_room(
    expandable: bool, events: list[Event], limit: int
) -> None:
    anyhow, held = (replay(events, expandable=expandable, limit_bytes=most) for most in (None, limit * MIB))
    assert held.max_allocated <= held.max_reserved <= limit * MIB
    if anyhow.max_reserved <= limit * MIB:
        assert held == anyhow
    if held.refused:
        assert anyhow.max_reserved > limit * MIB


@BOTH
@given(events=requests(), enough=st.integers(0, 200))
def test_a_replay_that_ends_early_says_the_same_of_what_it_was_asked(
    expandable: bool, events: list[Event], enough: int
) -> None:
    whole = replay(events, expandable=expandable)
    early = replay(events, expandable=expandable, enough_bytes=enough * MIB)
    assert (early.max_reserved > enough * MIB) == (whole.max_reserved > enough * MIB)
    assert early == whole or early.max_reserved > enough * MIB


@BOTH
@given(events=requests())
def test_a_replay_is_the_same_each_time_and_holds_what_it_hands_out(expandable: bool, events: list[Event]) -> None:
    first = replay(events, expandable=expandable)
    assert first == replay(events, expandable=expandable)
    assert asked_at_most(events) <= first.max_allocated <= first.max_reserved
    assert sum(segment.nbytes for segment in first.segments) == first.max_reserved
    # everything freed: a second time no more is reserved, for all that was is there again
    assert replay([*events, *left(events)], expandable=expandable).max_reserved == first.max_reserved


def left(events: list[Event]) -> list[Event]:
    freed = {name for op, name, _, _ in events if op == "free"}
    return [free(name) for op, name, _, _ in events if op == "alloc" and name not in freed]


def asked_at_most(events: list[Event]) -> int:
    sizes: dict[int, int] = {}
    now = most = 0
    for op, name, nbytes, _ in events:
        if op == "alloc":
            sizes[name] = nbytes
        now += nbytes if op == "alloc" else -sizes[name]
        most = max(most, now)
    return most


def test_what_all_came_to_can_be_read_by_segment() -> None:
    got = replay([alloc(0, 30), alloc(1, 0.5, stream=2)], expandable=False)
    assert [(s.stream, s.small, s.nbytes // MIB) for s in got.segments] == [(0, False, 30), (2, True, 2)]


@BOTH
def test_as_many_bytes_as_are_counted_anywhere_are_reserved(expandable: bool) -> None:
    """A tenth of 2**62 bytes ten times over: addresses are no narrower than counts."""
    whole = (1 << 62) // 10
    large: list[Event] = [("alloc", name, whole, 0) for name in range(1, 11)]
    events = [alloc(0, 1), *large, free(5), alloc(11, 7), free(3)]
    got = replay(events, expandable=expandable)
    assert got.max_reserved >= got.max_allocated >= 10 * whole
    assert got.max_reserved < 10 * whole + 100 * MIB
