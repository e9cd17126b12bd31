"""Sizes beyond which int64 bytes could overflow: refused before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping

from trainledger.errors import BadInput
from trainledger.facts.model import PRODUCT_LIMIT, Model
from trainledger.facts.workload import Workload
from trainledger.plans.plan import DEGREE_LIMIT, Scenario
from trainledger.units import format_bytes

SEQ_LIMIT = 1 << 27
"""Tokens of a sequence: a hundred times the longest context that any model here has."""
BATCH_LIMIT = 1 << 40
"""Sequences per step: far above any token budget."""
BUCKET_LIMIT = 1 << 40
"""Elements of a gradient bucket: more than any model has parameters."""
_BYTES_PER_ELEMENT = 16
"""No activation element is counted more often than four times in four bytes."""


def between(flag: str, value: int | None, least: int, most: int) -> None:
    """Refuse a number outside [least, most]; None is not given."""
    if value is not None and not least <= value <= most:
        raise BadInput(f"--{flag} is {value}: it must lie between {least} and {most}")


def check_workload(workload: Workload) -> None:
    """Bounds of what the user fixes."""
    between("seq", workload.seq, 1, SEQ_LIMIT)
    between("gbs", workload.gbs, 1, BATCH_LIMIT)
    between("lora-rank", workload.lora_rank, 0, DEGREE_LIMIT)
    between("frozen-copy", workload.frozen_copy, 0, 1024)


def check_scenario(scenario: Scenario) -> None:
    """Bounds of the numbers that are no columns of a plan; 0 is the engine's own, and what is below it has a rule."""
    for flag, value, most in (
        ("recompute-layers", scenario.recompute_layers, DEGREE_LIMIT),
        ("loss-chunks", scenario.loss_chunks, SEQ_LIMIT),
        ("reduce-bucket", scenario.reduce_bucket, BUCKET_LIMIT),
    ):
        between(flag, max(value, 0), 0, most)


def check_reserve(reserve_bytes: int, card: str, usable_bytes: int) -> None:
    """Refuse to keep free what the whole card does not have."""
    if reserve_bytes >= usable_bytes:
        raise BadInput(
            f"--reserve is {format_bytes(reserve_bytes)}, and {card} has {format_bytes(usable_bytes)} to use; "
            "keep less of it free"
        )


def check_degrees(columns: Mapping[str, int | None]) -> None:
    """Bounds of degrees and of the GPUs."""
    for name, value in columns.items():
        between(name.replace("_", "-"), value, 1, DEGREE_LIMIT)


def check_microbatches(gbs: int | None, share: int, batches: int) -> None:
    """Refuse more micro-batches in a step than are counted."""
    if batches > DEGREE_LIMIT:
        raise BadInput(
            f"--gbs {gbs} makes {batches} micro-batches of mbs x dp = {share} sequences, and at most {DEGREE_LIMIT} "
            "are counted; lower --gbs, or raise --mbs"
        )


def check_countable(model: Model, workload: Workload, scenario: Scenario, columns: Mapping[str, int]) -> None:
    """Refuse a micro-batch whose activations or traffic, at the very most, pass 2**62 bytes."""
    per_token = sum(sum(t.shape) * t.copies for t in (*model.embedding, *model.final) if len(t.shape) > 1)
    for block in model.blocks:
        visited = block.moe.top_k if block.moe is not None else 1
        widths = sum(sum(t.shape) * (visited if t.role == "expert" else t.copies) for t in block.tensors)
        if scenario.attention == "eager" and block.attention is not None:
            widths += block.attention.heads * workload.seq
        per_token += widths * len(block.layers)
    batches = columns["num_microbatches"]
    most = _BYTES_PER_ELEMENT * workload.seq * columns["mbs"] * per_token * batches
    if not model.params_only and most > PRODUCT_LIMIT:
        raise BadInput(
            f"--seq {workload.seq} with mbs={columns['mbs']} and {batches} micro-batches on {model.name} could pass "
            f"2**62 bytes, more than is counted exactly; lower --seq, --mbs or --gbs"
        )
