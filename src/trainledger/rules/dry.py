"""What a dry run of the program cannot do: its tensors are fake, and its process group answers nobody."""

from __future__ import annotations

from trainledger.plans import sharding
from trainledger.plans.plan import Plans
from trainledger.plans.setting import Setting
from trainledger.rules.rule import Mask, Rule

MOST_RANKS = 1024
"""Every rank is predicted to find those that differ: a tenth of a second for a rank of a 70B model."""


def _dry_ddp(setting: Setting, plans: Plans) -> Mask | bool:
    """Where DistributedDataParallel wraps the model, whose reducer is C++ that waits for gradients to arrive."""
    return sharding.wrapped(plans, "ddp") & (setting.precision is not None and not setting.casts)


def _dry_experts(setting: Setting, plans: Plans) -> bool:
    routed = any(block.moe is not None for block in setting.model.blocks)
    return routed and setting.scenario.precision != "bf16"


RULES: tuple[Rule, ...] = (
    Rule(
        id="dry-ddp",
        severity="refuse",
        scope="runtime",
        source="PyTorch csrc/distributed/c10d/comm.cpp 114 at 2.13.0: no hook result from a fake group",
        broken=_dry_ddp,
        sentence=(
            "--dry with dp={dp} at --zero 0 in {precision}: that is DistributedDataParallel, which a fake process "
            "group cannot answer; raise --zero, use --precision bf16, or leave --dry out"
        ),
    ),
    Rule(
        id="dry-experts",
        severity="refuse",
        scope="runtime",
        source="PyTorch _meta_registrations.py meta_grouped_mm at 2.13.0",
        broken=_dry_experts,
        sentence=(
            "--dry with routed experts in {precision}: PyTorch's grouped product of fake tensors knows bf16 alone; use "
            "--precision bf16, or leave --dry out"
        ),
    ),
    Rule(
        id="dry-ranks",
        severity="refuse",
        scope="runtime",
        source="trainledger service/prove.py",
        broken=lambda setting, plans: plans.gpus > MOST_RANKS,
        sentence=(
            f"--dry with --gpus {{gpus}}: each rank is predicted to find those that differ, and at most {MOST_RANKS} "
            "are; lower a degree"
        ),
    ),
)
