"""Engine profiles and optimizers as data; `load_profile` picks the file that covers a release."""

from __future__ import annotations

import re
import tomllib
from calendar import monthrange
from datetime import date
from functools import lru_cache
from importlib.resources import files
from typing import Any

import msgspec

from trainledger.errors import BadInput, UnknownName
from trainledger.profiles.profile import Optimizer, Profile

PROFILES: dict[str, tuple[str, ...]] = {
    "paper": ("any.toml",),
    "pytorch": ("2.13.toml", "2.4.toml"),
    "torchtitan": (
        "b5bcd76.toml",
        "2026-04.toml",
        "2026-03.toml",
        "2026-01.toml",
        "2025-12.toml",
        "2025-11.toml",
        "2025-09.toml",
        "2025-07.toml",
        "2025-04.toml",
        "2024-12.toml",
        "2024-10.toml",
        "2024-04.toml",
        "graph-trainer.toml",
    ),
    "fsdp1": ("2.13.toml", "2.6.toml", "2.4.toml", "composer.toml", "fsdp-qlora.toml"),
    "deepspeed": ("0.19.toml", "0.14.toml"),
    "deepspeed-estimator": ("0.19.toml", "before-0.14.3.toml"),
    "megatron": ("0.20.toml", "0.11.toml", "zero-bubble.toml"),
    "megatron-deepspeed": ("2022-03.toml", "2022-01.toml"),
    "nanotron": ("2024-08.toml", "2024-04.toml"),
}
"""Files of each engine, newest first; the first is used when no release is given."""


DAY = re.compile(r"(?P<year>[0-9]{4})-(?P<month>[0-9]{2})(?:-(?P<day>[0-9]{2}))?")
"""How a release is named by when its source was read."""
MOST_DIGITS = 9
"""Of each number of a release."""


ALIASES = {
    "ddp": "pytorch",
    "fsdp": "pytorch",
    "fsdp2": "pytorch",
    "megatron-core": "megatron",
    "megatron-lm": "megatron",
    "mcore": "megatron",
}
"""Other names of engines; FSDP2 and DDP are zero_stages of one PyTorch profile."""

OPTIMIZER_ALIASES = {
    "adam": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw-fused",
    "adamw_8bit": "adamw-8bit",
    "adamw_bnb_8bit": "adamw-8bit",
}
"""Names that transformers' `--optim` and Megatron's `--optimizer` have for optimizers that keep the same."""

SHARDING = {"fsdp": 3, "fsdp2": 3}
"""Names that say a zero_stage by themselves: fully_shard lets weights go after each forward. [fsdp2-knobs]"""


def engine_names() -> tuple[str, ...]:
    """Engines that have a profile, sorted."""
    return tuple(sorted(PROFILES))


def releases(engine: str) -> tuple[Profile, ...]:
    """Every profile of an engine, newest first."""
    return tuple(read_profile(engine, name) for name in PROFILES[engine])


@lru_cache(maxsize=32)
def load_profile(engine: str, framework_version: str = "") -> Profile:
    """The profile of `engine` for a release ("" is the newest that was read).

    Raises UnknownName for an engine without a profile and BadInput for a release that no file covers.
    """
    engine = ALIASES.get(engine.lower(), engine.lower())
    if engine not in PROFILES:
        raise UnknownName("engine", engine, PROFILES)
    candidates = releases(engine)
    if not framework_version:
        return candidates[0]
    wanted = released(candidates[0], framework_version)
    for profile in candidates:
        if covers(profile, wanted):
            return profile
    read = ", ".join(p.framework_version for p in candidates)
    raise BadInput(
        f"--framework-version {framework_version} of {candidates[0].framework} was not read: "
        f"its accounting is known at {read}; leave the flag out to use the newest"
    )


@lru_cache(maxsize=1)
def optimizers() -> dict[str, Optimizer]:
    """Every optimizer by name."""
    text = files("trainledger.profiles").joinpath("optimizers.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, Optimizer])


def load_optimizer(name: str) -> Optimizer:
    """The optimizer called `name`, or UnknownName."""
    known = optimizers()
    if name not in known:
        raise UnknownName("optimizer", name, [*known, *OPTIMIZER_ALIASES])
    return known[name]


@lru_cache(maxsize=32)
def read_profile(engine: str, filename: str) -> Profile:
    """One profile file of an engine, laid over the one that it names as its base.

    Rows of the base's states table are changed by `changed`, each by what it is called, or `gone`.
    """
    return msgspec.convert(_laid_out(engine, filename), Profile)


def _laid_out(engine: str, filename: str) -> dict[str, Any]:
    folder = files("trainledger.profiles").joinpath(engine.replace("-", "_"))
    read = tomllib.loads(folder.joinpath(filename).read_text(encoding="utf-8"))
    base = read.pop("base", "")
    if not base:
        return read
    changed = {row.pop("what"): row for row in read.pop("changed", ())}
    laid = _without_lost_stages(_over(_laid_out(engine, base), read))
    gone = {what for what, row in changed.items() if row.pop("gone", False)}
    rows = [row for row in laid["state"] if row["what"] not in gone]
    return {**laid, "state": [{**row, **changed.get(row["what"], {})} for row in rows]}


def _without_lost_stages(laid: dict[str, Any]) -> dict[str, Any]:
    """A profile without the rows of its base for zero_stages that it lacks itself."""
    rows = [row for row in laid["state"] if "zero" not in row or set(row["zero"]) & set(laid["zero_stages"])]
    return {**laid, "state": rows}


def _over(under: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    """Tables key by key, everything else whole."""
    both = {key: _over(under[key], value) for key, value in upper.items() if isinstance(value, dict) and key in under}
    return {**under, **upper, **both}


def zero_unsaid(engine: str, profile: Profile) -> int:
    """The zero_stage of a run under the name `engine` whose user says none.

    >>> [zero_unsaid(name, load_profile(name)) for name in ("torchtitan", "nanotron", "pytorch", "fsdp2", "megatron")]
    [3, 1, 0, 3, 0]
    """
    return SHARDING.get(engine.lower(), profile.zero_unsaid)


def released(newest: Profile, release: str) -> str:
    """The day of a release that is named by its number, where an engine's files are ranges of days.

    A number between two releases is the older one, and one above all is what was read last; what is named by a day, or
    by anything else, stays as it is.
    """
    wanted = _numbers(release)
    if not newest.released or not wanted or _is_day(release):
        return release
    if all(_numbers(number) < wanted for number in newest.released):
        return newest.framework_version
    days = [day for number, day in newest.released.items() if _numbers(number) <= wanted]
    return max(days, default=release)


def covers(profile: Profile, release: str) -> bool:
    """Whether a profile answers for a release, given by number or by day as the profile's own are."""
    if release == profile.framework_version:
        return True
    wanted = _numbers(release)
    if not profile.from_version or not wanted or _is_day(release) != _is_day(profile.from_version):
        return False
    below = not profile.before_version or wanted < _numbers(profile.before_version)
    return _numbers(profile.from_version) <= wanted and below


def _is_day(release: str) -> bool:
    return bool(_day(release))


def _day(release: str) -> tuple[int, ...]:
    """(2025, 3, 31) for "2025-03-31" and, a month being its end, for "2025-03"; () for what no calendar has."""
    named = DAY.fullmatch(release)
    if named is None:
        return ()
    year, month = int(named["year"]), int(named["month"])
    try:
        last = monthrange(date(year, month, 1).year, month)[1]
    except ValueError:
        return ()
    day = int(named["day"] or last)
    return (year, month, day) if 1 <= day <= last else ()


def _numbers(release: str) -> tuple[int, ...]:
    """(0, 19, 6) for "0.19.6" and (2025, 3, 31) for "2025-03"; () where it is neither."""
    if DAY.fullmatch(release):
        return _day(release)
    parts = release.lstrip("v").split(".")
    counts = all(p.isascii() and p.isdigit() and len(p) <= MOST_DIGITS for p in parts)
    return tuple(map(int, parts)) if counts else ()
