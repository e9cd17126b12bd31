"""How far a meter may be from its estimate: what predictions of published runs have been off by.

data/measured/residuals.toml holds, by engine and meter, the 5 % and 95 % quantiles of the logarithm of predicted over
measured, and the same over all engines, which stands for those of which no run is published.
"""

from __future__ import annotations

import math
from functools import lru_cache

import msgspec

from trainledger.facts.load import DATA, load_toml

POOLED = "pooled"


class Residual(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Quantiles over `values` distinct measured peaks."""

    values: int
    low: float
    high: float


@lru_cache(maxsize=1)
def _table() -> dict[str, dict[str, Residual]]:
    return msgspec.convert(load_toml(DATA / "measured" / "residuals.toml"), dict[str, dict[str, Residual]])


def residual(engine: str, meter: str) -> Residual | None:
    """Of the engine's own published runs, or of all; None where no run of any engine prints the meter."""
    table = _table()
    return table.get(engine, {}).get(meter) or table.get(POOLED, {}).get(meter)


def bounds(engine: str, meter: str, estimate: int) -> tuple[int, int]:
    """(lower, upper) bytes; an estimate that was always too small on one side still lies between them."""
    found = residual(engine, meter)
    if found is None:
        return estimate, estimate
    lower, upper = (round(estimate * math.exp(-quantile)) for quantile in (found.high, found.low))
    return min(lower, estimate), max(upper, estimate)
