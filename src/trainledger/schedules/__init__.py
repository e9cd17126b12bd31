"""Pipeline schedules, one file each: the order in which a stage works, and what it holds at once by a closed form."""

from __future__ import annotations

from trainledger.errors import UnknownName
from trainledger.schedules import gpipe, interleaved, one_f_one_b, zb_1p, zb_2p, zb_h1, zero_bubble
from trainledger.schedules.schedule import Op, Schedule

__all__ = ["SCHEDULES", "Op", "Schedule", "find_schedule"]

SCHEDULES: tuple[Schedule, ...] = (
    gpipe.SCHEDULE,
    one_f_one_b.SCHEDULE,
    interleaved.SCHEDULE,
    zb_h1.SCHEDULE,
    zb_1p.SCHEDULE,
    zb_2p.SCHEDULE,
    zero_bubble.SCHEDULE,
)
"""Every schedule; which of them an engine runs is in its profile."""

_BY_NAME = {schedule.name: schedule for schedule in SCHEDULES}


def find_schedule(name: str) -> Schedule:
    """The schedule called `name`, or UnknownName."""
    if name not in _BY_NAME:
        raise UnknownName("schedule", name, _BY_NAME)
    return _BY_NAME[name]
