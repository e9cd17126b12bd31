"""What a rank must be told to train: a TrainSpec, the same on every rank, as JSON. No torch here."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from trainledger.runtime.spec import RunSpec, Told

Action = Literal["warn", "bf16", "stop"]
ACTIONS: tuple[Action, ...] = get_args(Action)
"""What happens where casts to FP8 lose more than they may: it is said, the layer computes in bf16, the run stops."""

METRICS, CHECKPOINTS, REPORT, STOP, TOLD = "metrics.jsonl", "checkpoints", "report.html", "stop", "spec.json"
"""What a run folder holds: a line a step, checkpoints, the curves, the file that ends a run, what ranks are told."""


class DataSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens.

    train, held_out   token files; held_out "" for a run that evaluates nothing
    digest            of the tokens that are trained on, so that all ranks read the same ones
    held_out_digest   of those that are not
    eval_sequences    how many held-out sequences an evaluation takes; 0: all
    """

    train: str
    held_out: str = ""
    digest: str = ""
    held_out_digest: str = ""
    eval_sequences: int = 0


class Fp8Spec(msgspec.Struct, frozen=True, kw_only=True):
    """How much casts to FP8 may lose, as shares of the elements of one operand of one layer.

    every   steps between two counts; 0: casts are not counted
    """

    saturated_limit: float = 0.01
    flushed_limit: float = 0.1
    action: Action = "warn"
    every: int = 10


class TrainSpec(Told, frozen=True, kw_only=True):
    """One training run.

    out                 the run folder, the same on every rank
    warmup_steps        the learning rate rises over them, then falls to `min_learning_rate` along a cosine
    eval_every          steps between evaluations; 0: at the end alone
    checkpoint_every    steps between checkpoints; 0: at the end alone
    resume              go on after the newest good checkpoint
    spike_factor        a loss above this many times the median of the `spike_window` before it ends the run; 0: none
    """

    run: RunSpec
    data: DataSpec
    out: str
    warmup_steps: int = 0
    min_learning_rate: float = 0.0
    eval_every: int = 0
    checkpoint_every: int = 0
    keep_last: int = 3
    asynchronous: bool = True
    resume: bool = False
    fp8: Fp8Spec = Fp8Spec()
    spike_factor: float = 3.0
    spike_window: int = 50

    @property
    def plan(self) -> dict[str, int]:
        """The row of a Plans, as of a RunSpec."""
        return self.run.plan
