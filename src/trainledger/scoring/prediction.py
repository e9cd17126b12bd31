"""What is said of one row of a table: a figure of states, a peak of memory, or why there is neither."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal

from trainledger.profiles.profile import Category, Instant

Status = Literal["predicted", "unsupported", "incomplete"]


class Unsupported(Exception):
    """A row asks for what no account here answers; the message says what."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Predicted states: `value` in the row's unit, exact, and what it was computed from."""

    value: Fraction
    unit: str
    by_category: Mapping[Category, int]
    num_params: int
    profile: str
    framework_version: str
    instant: Instant

    def as_json(self) -> dict[str, Any]:
        """What `predict --json` shows of it."""
        return {
            "value": float(self.value),
            "bytes": sum(self.by_category.values()),
            "bytes_by_category": dict(self.by_category),
            "params": self.num_params,
            "unit": self.unit,
            "profile": self.profile,
            "framework_version": self.framework_version,
            "instant": self.instant,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What one meter should show, in bytes."""

    estimate: int
    lower: int
    upper: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunMemory:
    """The peak of the rank that holds most: each meter that the account has, where and when, and how it was read.

    place          of the step, in words
    usable_bytes   of the row's card; None where the row names none that is known
    assumed        what was taken for granted where the row is silent
    """

    meters: Mapping[str, Bounds]
    pp_stage: int
    place: str
    profile: str
    framework_version: str
    usable_bytes: int | None
    assumed: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """What `predict --json` shows of it."""
        return {
            "memory_bytes": {name: dataclasses.asdict(bounds) for name, bounds in self.meters.items()},
            "pp_stage": self.pp_stage,
            "place": self.place,
            "profile": self.profile,
            "framework_version": self.framework_version,
            "usable_bytes": self.usable_bytes,
            "assumed": list(self.assumed),
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A printed figure of other memory: `value` in the row's unit, exact; `measured`: what is printed is a reading."""

    value: Fraction
    unit: str
    profile: str
    framework_version: str
    measured: bool

    def as_json(self) -> dict[str, Any]:
        """What `predict --json` shows of it."""
        return {
            "value": float(self.value),
            "unit": self.unit,
            "profile": self.profile,
            "framework_version": self.framework_version,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is said of one row; `states`, `memory` or `figure` where its status is "predicted"."""

    status: Status
    reason: str
    states: States | None = None
    memory: RunMemory | None = None
    figure: Figure | None = None
