"""Measure the training program against a loop written by hand, and what observing a step costs; fail beyond a budget.

    python scripts/bench_runtime.py            (or: make bench)

Two ranks are forked and take turns: a step of the one, a step of the other, so that whatever else the machine does
meets both alike. What is judged is the ratio of their times, twenty times. Its median lies between the 6th and the 15th
of twenty sorted ratios with probability 0.959, whatever their distribution: each is above or below the median as a coin
falls, and that is the chance of 6 to 14 heads in 20. An interval from Student's t would follow the few steps that the
machine disturbed.
"""

from __future__ import annotations

import math
import sys
import time

import numpy as np

from plain_loop import CONFIG, TURNS, both_s, observed_s, spec_of
from trainledger.runtime.launch.fork import run_forked

PAIRS, OBSERVED_PAIRS = 20, 10
CERTAIN = 0.95
LEAST_SPEED = 0.90
"""Tokens per second of the program over those of the plain loop."""
MOST_COST, STEP_S = 0.05, 2.0
"""What observing may add to a step of so many seconds of work or more: it costs by the operation, however long."""
LAYOUTS = {"DDP": 0, "ZeRO-3": 3}


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """(low, median, high): the median of what is sampled lies between the ends with probability CERTAIN at least.

    >>> interval([float(number) for number in range(1, 21)])
    (6.0, 10.5, 15.0)
    """
    ordered, n = np.sort(np.asarray(ratios)), len(ratios)
    beyond = np.cumsum([math.comb(n, heads) / 2**n for heads in range(n)])
    end = int(np.sum(beyond <= (1 - CERTAIN) / 2))
    assert end > 0, f"{n} pairs are too few for an interval"
    return float(ordered[end - 1]), float(np.median(ordered)), float(ordered[-end])


def judged(what: str, kept: bool, found: tuple[float, float, float], budget: str) -> bool:
    """Print one line; whether the budget is kept."""
    low, middle, high = found
    print(f"{'PASS' if kept else 'FAIL'}  {what:<46} {middle:7.3f}     budget {budget}, 95 % {low:.3f} to {high:.3f}")
    return kept


def main() -> int:
    """Print every measurement; 1 when a budget is exceeded."""
    start = time.perf_counter()
    kept: list[bool] = []
    for name, zero_stage in LAYOUTS.items():
        spec = spec_of(CONFIG, zero_stage, seq=256, mbs=1)
        pairs = run_forked(2, both_s, spec, PAIRS, timeout_s=300)[0]
        found = interval([plain / program for program, plain in pairs])
        kept.append(
            judged(f"speed against a plain loop, {name}, 2 ranks", found[0] > LEAST_SPEED, found, f"> {LEAST_SPEED}")
        )
        tokens = TURNS * 2 * spec.plan["mbs"] * spec.seq
        fastest = [tokens / min(seconds) for seconds in zip(*pairs, strict=True)]
        print(f"      at best {fastest[0]:.0f} tokens/s, the plain loop {fastest[1]:.0f}")
    cost = run_forked(2, observed_s, STEP_S, OBSERVED_PAIRS, timeout_s=300)[0]
    found = interval([observed / unwatched - 1 for observed, unwatched in cost.pairs_s])
    step_s = min(unwatched for _, unwatched in cost.pairs_s)
    kept.append(
        judged(f"observing a step of {step_s:.1f} s, ZeRO-3, 2 ranks", found[1] < MOST_COST, found, f"{MOST_COST}")
    )
    print(f"      {cost.operations:,} operations, {found[1] * step_s / cost.operations * 1e6:.0f} us each")
    print(f"      {time.perf_counter() - start:.0f} s in all")
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
