"""What an answer says of the process that made it, which two identical answers may differ in."""

from __future__ import annotations

import time

import msgspec

import trainledger


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """How long it took, and the release of this package."""

    seconds: float
    version: str


def process_since(start: float) -> Process:
    """Of what began at `start` on time.perf_counter, and ends now."""
    return Process(seconds=round(time.perf_counter() - start, 3), version=trainledger.__version__)
