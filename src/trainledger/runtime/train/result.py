"""What a rank knows at the end of a training run. No torch here."""

from __future__ import annotations

from typing import Literal

import msgspec

from trainledger.runtime.observe.observation import Observation
from trainledger.runtime.precision.share import Share

How = Literal["finished", "stopped"]


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint.

    bytes       of all ranks
    blocked_s   training waited so long, at most on any rank
    """

    step: int
    bytes: int
    blocked_s: float


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """What casts of one operand of a layer to FP8 lost in the last step that was counted, as shares of its elements."""

    layer: str
    operand: str
    saturated: float
    flushed: float


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's run. All but memory and observation are the same on every rank.

    first           steps that were taken before this process began: of the checkpoint that it went on from
    steps           that have been taken in all
    loss            of the last step; held_out: of the last evaluation
    tokens_per_s    median over the steps of this process, without those that are watched
    skipped         steps of this process in which the optimizer did not step
    resumed_from    the checkpoint; passed_over: newer ones that could not be loaded, and why
    share           of the arithmetic of a step that is in FP8 now
    ran             products in FP8 that ran on all ranks in the first step; None under a recipe without
    memory_bytes    the most that this rank held: on CUDA allocated, else resident
    meter           which of the two
    observed_step   the one that `observation` is of; 0: none was
    """

    rank: int
    digest: str
    how: How
    first: int
    steps: int
    tokens: int
    loss: float | None
    held_out: float | None
    held_out_sequences: int
    tokens_per_s: float | None
    skipped: int
    scale: float | None
    resumed_from: str
    passed_over: tuple[tuple[str, str], ...]
    checkpoints: tuple[Written, ...]
    share: Share
    ran: int | None
    lost: tuple[Layer, ...]
    fallen: tuple[str, ...]
    said: tuple[str, ...]
    memory_bytes: int
    meter: Literal["allocated", "resident"]
    observed_step: int = 0
    observation: Observation | None = None
    torch_version: str = ""
