"""The learning rate of a step: a line up, then a cosine down. No torch here."""

from __future__ import annotations

import math


def learning_rate(index: int, steps: int, peak: float, *, warmup: int = 0, least: float = 0.0) -> float:
    """The rate of optimizer step `index`, counted from 0, of a run of `steps`.

    It rises by equal parts and is `peak` in the step after `warmup`; then it falls along half a cosine, and would be
    `least` one step after the last. [Loshchilov and Hutter 2017, SGDR, without restarts]

    >>> [round(learning_rate(index, 6, 1.0, warmup=2, least=0.1), 3) for index in range(6)]
    [0.333, 0.667, 1.0, 0.868, 0.55, 0.232]
    """
    if index < warmup:
        return peak * (index + 1) / (warmup + 1)
    done = (index - warmup) / max(1, steps - warmup)
    return least + (peak - least) * (1 + math.cos(math.pi * min(1.0, done))) / 2
