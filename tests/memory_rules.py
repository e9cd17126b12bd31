"""The cases of the rules about what memory is kept where: (what passes, what does not, words, models of the two)."""

from __future__ import annotations

from typing import Any

from strategies import convolving, dense, latent

MG = {"engine": "megatron"}
OFF = {**MG, "recompute": "none", "offload": ("activations",)}
FSDP1 = {"engine": "fsdp1", "zero_stage": 3, "dp_shard": 4}

REGIONS = {**MG, "recompute": "uniform-2"}

CASES: dict[str, tuple[Any, ...]] = {
    "fsdp1-one-rank": (FSDP1, {**FSDP1, "dp_shard": 1}, ("NO_SHARD", "raise dp", "--engine pytorch")),
    "recompute-regions": (REGIONS, REGIONS, ("uniform-2", "several kinds", "--recompute full"), latent(), dense()),
    "offload-activations-pp": (OFF, {**OFF, "pp": 2}, ("pp=2", "set pp to 1")),
    "mg-offload-recompute": (OFF, {**OFF, "recompute": "full"}, ("--recompute full", "--recompute none")),
    "layers-accounted": ({}, {"tp": 2}, ("convolving has short convolutions", "tp=2", "--zero"), convolving()),
    "fsdp1-no-sync": (FSDP1, {**FSDP1, "num_microbatches": 2}, ("2 micro-batches", "no_sync", "sync_each_batch")),
}
