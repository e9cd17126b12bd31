"""Pipeline schedules: their orders run, and what closed forms say is held is what the orders hold."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from strategies import dense, plan_of, setting_of
from trainledger import schedules
from trainledger.errors import UnknownName
from trainledger.plans.plan import TURNS, make_plans
from trainledger.profiles import PROFILES, read_profile
from trainledger.rules import REFUSALS, RULES, violations
from trainledger.schedules import SCHEDULES, Op, Schedule, find_schedule
from trainledger.service import requests

SHARED_FILES = {"__init__", "schedule", "in_turn", "put_off"}
NAMES = [schedule.name for schedule in SCHEDULES]
SIZES = [(pp, vpp, m) for pp, vpp, m in product(range(1, 7), range(1, 4), range(1, 14)) if m % max(m // pp, 1) == 0]
Orders = list[tuple[Op, ...]]


def sizes(schedule: Schedule) -> Iterator[tuple[int, int, int]]:
    """(pp, vpp, num_microbatches) that the schedule can run."""
    return ((pp, vpp, m) for pp, vpp, m in SIZES if vpp == 1 or schedule.turns)


def orders(schedule: Schedule, pp: int, vpp: int, batches: int) -> Orders:
    return [schedule.ops(pp, vpp, batches, stage) for stage in range(pp)]


def moments(schedule: Schedule, ops: tuple[Op, ...]) -> Iterator[tuple[int, int]]:
    """(held whole, waiting for their weights) after every forward, and between the rest."""
    whole = kept = 0
    for op in ops:
        if op.kind == "forward":
            whole += 1
        elif schedule.releases == "weight":
            whole -= op.kind == "weight"
        else:
            split = any(other.kind == "weight" for other in ops)
            whole -= op.kind == "backward"
            kept += split * (1 if op.kind == "backward" else -1)
        yield whole, kept


def idle(work: Orders, pp: int, vpp: int, seconds: dict[str, int]) -> tuple[int, list[int]]:
    """(when the last stage is done, how long each stage waited between its first and last work); fails if stuck."""
    ends: dict[Op, int] = {}
    clock, waited, place = [0] * pp, [0] * pp, [0] * pp
    while any(place[stage] < len(work[stage]) for stage in range(pp)):
        before = sum(place)
        for stage in range(pp):
            while place[stage] < len(work[stage]):
                op = work[stage][place[stage]]
                need = op._replace(chunk=op.chunk + (-1 if op.kind == "forward" else 1))
                alone = op.kind == "weight" or not 0 <= need.chunk < pp * vpp
                if not alone and need not in ends:
                    break
                start = max(clock[stage], 0 if alone else ends[need])
                waited[stage] += start - clock[stage] if place[stage] else 0
                clock[stage] = ends[op] = start + seconds[op.kind]
                place[stage] += 1
        assert sum(place) > before, "every stage waits for another"
    return max(clock), waited


def test_the_folder_is_the_tuple_and_the_words_are_everywhere_the_same() -> None:
    folder = Path(schedules.__file__).parent
    files = [schedule.ops.__module__.rpartition(".")[2] for schedule in SCHEDULES]
    assert set(files) == {path.stem for path in folder.glob("*.py")} - SHARED_FILES
    assert len(set(files)) == len(set(NAMES)) == len(SCHEDULES)
    assert set(get_args(requests.Schedule)) == set(NAMES)
    assert set(TURNS) == {schedule.name for schedule in SCHEDULES if schedule.turns}
    for engine, releases in PROFILES.items():
        for release in releases:
            assert set(read_profile(engine, release).schedules) <= set(NAMES)


def test_an_unknown_schedule_is_refused_by_name() -> None:
    with pytest.raises(UnknownName, match="'v-half' is not a known schedule"):
        find_schedule("v-half")


@pytest.mark.parametrize("schedule", SCHEDULES, ids=NAMES)
def test_each_chunk_does_its_work_once_and_in_order(schedule: Schedule) -> None:
    for pp, vpp, batches in sizes(schedule):
        for stage, ops in enumerate(orders(schedule, pp, vpp, batches)):
            own = set(product(range(stage, pp * vpp, pp), range(batches)))
            at = {op: index for index, op in enumerate(ops)}
            assert len(at) == len(ops)
            assert {(op.chunk, op.microbatch) for op in ops if op.kind == "forward"} == own
            for chunk, batch in own:
                backward = at[Op("backward", chunk, batch)]  # a KeyError: not done
                assert at[Op("forward", chunk, batch)] < backward < at.get(Op("weight", chunk, batch), len(ops))
            assert sum(op.kind == "weight" for op in ops) in {0, len(own)}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=NAMES)
def test_no_stage_waits_for_another_that_waits_for_it(schedule: Schedule) -> None:
    for pp, vpp, batches in sizes(schedule):
        idle(orders(schedule, pp, vpp, batches), pp, vpp, {"forward": 1, "backward": 2, "weight": 1})


@pytest.mark.parametrize("schedule", SCHEDULES, ids=NAMES)
def test_closed_forms_are_what_the_order_holds(schedule: Schedule) -> None:
    """At one moment both are reached, and never more in all: while one that waits keeps no more than a whole one does,
    no other moment is worse."""
    every = list(sizes(schedule))
    deepest = max(pp for pp, _, _ in every)
    plans = make_plans(dict(zip(("pp", "vpp", "num_microbatches"), zip(*every, strict=True), strict=True)))
    stages = np.broadcast_to(np.arange(deepest), (len(every), deepest))
    whole, kept = schedule.in_flight(plans, stages), schedule.inputs_kept(plans, stages)
    for index, (pp, vpp, batches) in enumerate(every):
        for stage, ops in enumerate(orders(schedule, pp, vpp, batches)):
            seen = list(moments(schedule, ops))
            claimed = (int(whole[index, stage]), int(kept[index, stage]))
            assert claimed in seen, (pp, vpp, batches, stage)
            assert claimed[0] == max(held for held, _ in seen)
            assert sum(claimed) == max(map(sum, seen))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=NAMES)
def test_the_first_of_equal_stages_holds_most_where_that_is_said(schedule: Schedule) -> None:
    """Elsewhere a later one may, for some bytes of what waits: the StageTable must not drop it."""
    rises = False
    for pp, vpp, batches in sizes(schedule):
        plans, stages = plan_of(pp=pp, vpp=vpp, num_microbatches=batches), np.arange(pp)[np.newaxis]
        whole, kept = schedule.in_flight(plans, stages)[0], schedule.inputs_kept(plans, stages)[0]
        for price in (0, 0.5, 1, 1.5):
            rises |= bool((np.diff(whole + price * kept) > 0).any())
    assert rises != schedule.front_heavy


@pytest.mark.parametrize(
    ("name", "pp", "batches", "found"),
    [
        ("zb-1p", 4, 12, [(4, 0), (3, 1), (2, 2), (1, 3)]),
        ("zb-1p", 8, 24, [(8, 0), (7, 1), (6, 2), (5, 3), (4, 4), (3, 5), (2, 6), (1, 7)]),
        ("zb-2p", 4, 12, [(7, 2), (5, 5), (3, 8), (1, 11)]),
        ("zb-2p", 8, 24, [(15, 2), (13, 5), (11, 8), (9, 11), (7, 14), (5, 17), (3, 20), (1, 23)]),
    ],
)
def test_room_for_p_and_2p_is_filled_as_the_forks_scheduler_does(
    name: str, pp: int, batches: int, found: list[tuple[int, int]]
) -> None:
    """From the orders of sail-sg/zero-bubble-pipeline-parallelism at ed85b11c, auto_schedule.py: heuristic, f = b = w
    = 1000, messages 1, at the moment when 1 whole + 0.37 waiting is most."""
    plans, stages = plan_of(pp=pp, num_microbatches=batches), np.arange(pp)[np.newaxis]
    schedule = find_schedule(name)
    held = zip(schedule.in_flight(plans, stages)[0], schedule.inputs_kept(plans, stages)[0], strict=True)
    assert [(int(whole), int(kept)) for whole, kept in held] == found


@pytest.mark.parametrize(("name", "waits"), [("1f1b", 3), ("zb-h1", 1), ("zb-1p", 1), ("zb-2p", 0)])
@pytest.mark.parametrize("pp", [2, 4, 6])
def test_bubbles_are_those_of_the_paper(name: str, waits: int, pp: int) -> None:
    """Equal times of F, B and W: the first stage waits 3 (p - 1), a third of it, and not at all. [zero-bubble: 2.3]"""
    schedule, batches = find_schedule(name), 3 * pp + 1
    work = orders(schedule, pp, 1, batches)
    split = any(op.kind == "weight" for op in work[0])
    seconds = {"forward": 1, "backward": 1 if split else 2, "weight": 1}
    end, waited = idle(work, pp, 1, seconds)
    assert waited[0] == waits * (pp - 1)
    assert end == 3 * batches + max(waits, 1) * (pp - 1)


@pytest.mark.parametrize(
    ("engine", "schedule", "columns", "rule"),
    [
        ("deepspeed", "interleaved", {}, "engine-schedule"),
        ("torchtitan", "zb-2p", {"pp": 2}, "engine-schedule"),
        ("torchtitan", "gpipe", {"pp": 2, "vpp": 2, "num_microbatches": 4}, "vpp-needs-interleaved"),
        ("deepspeed", "1f1b", {"pp": 2, "vpp": 2}, "vpp-needs-interleaved"),
        ("torchtitan", "zero-bubble", {"pp": 2, "num_microbatches": 2}, "interleaved-needs-vpp"),
        ("torchtitan", "interleaved", {"pp": 2, "vpp": 2, "num_microbatches": 5}, "equal-rounds"),
        ("torchtitan", "gpipe", {"pp": 2, "num_microbatches": 5}, ""),
        ("torchtitan", "1f1b", {"pp": 2, "num_microbatches": 5}, ""),
        ("pytorch", "zero-bubble", {"pp": 2, "num_microbatches": 2, "zero_stage": 3}, ""),
    ],
)
def test_a_schedule_asks_for_chunks_and_rounds_of_its_own(
    engine: str, schedule: str, columns: dict[str, int], rule: str
) -> None:
    setting = setting_of(dense(), engine=engine, schedule=schedule, recompute="none")
    about = {"engine-schedule", "vpp-needs-interleaved", "interleaved-needs-vpp", "equal-rounds"}
    assert set(violations(REFUSALS, setting, make_plans(columns))) & about == {rule} - {""}


def test_every_engine_that_takes_turns_says_which_micro_batches_fit() -> None:
    asking = [rule.engines for rule in RULES if rule.id in ("interleaved-microbatches", "equal-rounds")]
    for engine, releases in PROFILES.items():
        for release in releases:
            profile = read_profile(engine, release)
            if set(profile.schedules) & set(TURNS) and "vpp" in profile.axes:
                assert sum(profile.name in engines for engines in asking) == 1, profile.name
