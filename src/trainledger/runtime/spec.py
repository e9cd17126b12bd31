"""What a rank must be told to take part in a run: a RunSpec, the same on every rank, as JSON.

The service builds it once the rules have passed; ranks compare its digest before they start.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec

from trainledger.facts.model import Model

Precision = Literal["fp32", "bf16", "fp16", "fp8-tensorwise", "fp8-rowwise", "fp8-forward"]
Optimizer = Literal["adamw", "adamw-fused", "adamw-8bit", "adamw-fp8", "sgd", "sgd-momentum"]
Recompute = Literal["none", "full"]
Schedule = Literal["1f1b", "interleaved", "zero-bubble"]
Rotation = Literal["ring", "all_gather"]

FP8_RECIPES = ("fp8-tensorwise", "fp8-rowwise", "fp8-forward")
"""Recipes that multiply the matrices of blocks in FP8."""
OPERANDS = ("input", "weight", "grad_output")
"""What an FP8 layer casts."""


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """How the loss is scaled under fp16.

    initial           the factor of the first step
    growth_interval   steps without an infinity after which it is doubled; with one it is halved
    minimum           it never goes below: an infinity there ends the run
    """

    initial: float = 65536.0
    growth_interval: int = 2000
    minimum: float = 1.0


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank is told of a job."""

    @property
    def digest(self) -> str:
        """Hash of all of it, which all ranks must share."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()


class RunSpec(Told, frozen=True, kw_only=True):
    """One run.

    config          the Hugging Face config.json that `model` was read from: activation, norms, rotary positions
    plan            the row of a Plans: degrees, zero_stage, mbs, num_microbatches
    pp_layout       layers of each virtual stage in order; () is the engine's own split
    early_stop      a recomputed block stops at the last tensor that the backward needs
    loss_parallel   under tp the loss is computed on the cut vocabulary
    clip_norm       gradients are scaled down to this global norm; 0: left alone
    scaling         of the loss, under fp16
    steps           optimizer steps; the last one is the one that is observed. DDP is settled from the third on: it
                    finds the order of gradients in the first and makes its buckets anew in the second
    checkpoint      one is saved after the observed step, and what is in its files is counted
    faults          planted faults (runtime/faults.py), for tests of the proof itself
    """

    model: Model
    config: dict[str, Any]
    plan: dict[str, int]
    seq: int
    pp_layout: tuple[int, ...] = ()
    precision: Precision = "fp32"
    optimizer: Optimizer = "adamw"
    recompute: Recompute = "none"
    early_stop: bool = True
    schedule: Schedule = "1f1b"
    cp_comm: Rotation = "ring"
    loss_parallel: bool = True
    clip_norm: float = 1.0
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    seed: int = 0
    scaling: Scaling = Scaling()
    steps: int = 3
    checkpoint: bool = False
    faults: tuple[str, ...] = ()

    @property
    def sequences_per_step(self) -> int:
        """The global batch: sequences of all micro-batches of all replicas."""
        plan = self.plan
        return plan["mbs"] * plan["num_microbatches"] * plan["dp_replicate"] * plan["dp_shard"]
