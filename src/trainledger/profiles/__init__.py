"""Engine profiles and optimizers as data; `load_profile` picks the file that covers a release."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from importlib.resources import files

import msgspec

from trainledger.errors import BadInput, UnknownName
from trainledger.profiles.profile import Optimizer, Profile

PROFILES: dict[str, tuple[str, ...]] = {
    "paper": ("any.toml",),
    "pytorch": ("2.13.toml",),
    "torchtitan": ("b5bcd76.toml",),
    "deepspeed": ("0.19.toml",),
    "deepspeed-estimator": ("0.19.toml", "before-0.14.3.toml"),
    "megatron": ("0.20.toml",),
}
"""Files of each engine, newest first; the first is used when no release is given."""


ALIASES = {
    "ddp": "pytorch",
    "fsdp": "pytorch",
    "fsdp2": "pytorch",
    "megatron-core": "megatron",
    "megatron-lm": "megatron",
    "mcore": "megatron",
}
"""Other names of engines; FSDP2 and DDP are zero_stages of one PyTorch profile."""


def engine_names() -> tuple[str, ...]:
    """Engines that have a profile, sorted."""
    return tuple(sorted(PROFILES))


@lru_cache(maxsize=32)
def load_profile(engine: str, framework_version: str = "") -> Profile:
    """The profile of `engine` for a release ("" is the newest that was read).

    Raises UnknownName for an engine without a profile and BadInput for a release that no file covers.
    """
    engine = ALIASES.get(engine, engine)
    if engine not in PROFILES:
        raise UnknownName("engine", engine, PROFILES)
    candidates = [read_profile(engine, name) for name in PROFILES[engine]]
    if not framework_version:
        return candidates[0]
    for profile in candidates:
        if covers(profile, framework_version):
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
        raise UnknownName("optimizer", name, known)
    return known[name]


@lru_cache(maxsize=32)
def read_profile(engine: str, filename: str) -> Profile:
    """One profile file of an engine."""
    folder = files("trainledger.profiles").joinpath(engine.replace("-", "_"))
    text = folder.joinpath(filename).read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), Profile)


def covers(profile: Profile, release: str) -> bool:
    """Whether a profile answers for a release."""
    if release == profile.framework_version:
        return True
    wanted = _numbers(release)
    if not profile.from_version or not wanted:
        return False
    below = not profile.before_version or wanted < _numbers(profile.before_version)
    return _numbers(profile.from_version) <= wanted and below


def _numbers(release: str) -> tuple[int, ...]:
    """(0, 19, 6) for "0.19.6"; () where it is not a dotted release."""
    parts = release.lstrip("v").split(".")
    return tuple(int(p) for p in parts) if all(p.isascii() and p.isdigit() for p in parts) else ()
