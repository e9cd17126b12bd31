"""The cases of the rules about what memory is kept where: (what passes, what does not, words)."""

from __future__ import annotations

from typing import Any

FSDP1 = {"engine": "fsdp1", "zero_stage": 3, "dp_shard": 4}

CASES: dict[str, tuple[Any, ...]] = {
    "fsdp1-one-rank": (FSDP1, {**FSDP1, "dp_shard": 1}, ("NO_SHARD", "raise dp", "--engine pytorch")),
    "fsdp1-no-sync": (FSDP1, {**FSDP1, "num_microbatches": 2}, ("2 micro-batches", "no_sync", "sync_each_batch")),
}
