"""What a run is told beside its plan: numbers of its dtypes, its budget, and whether a baseline stands for it."""

from __future__ import annotations

import math

import msgspec

from trainledger.checklist.account import Account
from trainledger.checklist.check import Check, Evidence, Found

BF16_HALF_STEP = 2**-9
"""Of a weight's size: bf16 has 8 bits of significand, so that a smaller change rounds back to it. [bf16]"""
FP16_LARGEST = 65504.0
HOUR_S = 3600


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """What a run takes at least; null where it is not known.

    step_s_at_peak   the arithmetic of the busiest rank at the card's peak: no run is faster
    gpu_hours, usd   of the whole budget of tokens, at that rate: the least
    """

    tokens: int | None
    tokens_per_step: int
    steps: int | None
    step_s_at_peak: float | None
    gpu_hours_at_peak: float | None
    usd_at_peak: float | None
    free_bytes: int | None


def budget(account: Account) -> Budget:
    """What is known of it before a run."""
    told, workload, row = account.told, account.setting.workload, account.row
    dp = int(account.plans.dp[0])
    sequences = workload.gbs or row["mbs"] * row["num_microbatches"] * dp
    per_step = sequences * workload.seq
    steps = math.ceil(told.tokens / per_step) if told.tokens is not None else None
    least = account.least_step_s
    hours = steps * least * int(account.plans.gpus[0]) / HOUR_S if steps is not None and least is not None else None
    price = told.usd_per_gpu_hour
    return Budget(
        tokens=told.tokens,
        tokens_per_step=per_step,
        steps=steps,
        step_s_at_peak=least,
        gpu_hours_at_peak=hours,
        usd_at_peak=hours * price if hours is not None and price is not None else None,
        free_bytes=account.usable - account.device if account.usable is not None else None,
    )


def _unsaid(account: Account) -> Found | None:
    """A run whose end, price or room nobody has worked out."""
    setting, told = account.setting, account.told
    lacks = [
        (setting.accelerator is None, "which card it runs on", "--gpu or --cluster"),
        (setting.workload.gbs is None, "the global batch", "--gbs"),
        (told.tokens is None, "how many tokens it is to see", "--token-budget"),
        (told.usd_per_gpu_hour is None, "what a GPU hour costs", "--usd-per-gpu-hour"),
    ]
    missing = [(what, flag) for lacking, what, flag in lacks if lacking]
    if not missing:
        return None
    known = budget(account)
    least = known.step_s_at_peak
    return Found(
        message=f"there is no budget before the run: nobody said {', '.join(what for what, _ in missing)}",
        knob=f"give {', '.join(flag for _, flag in missing)}",
        evidence=(
            Evidence(line="tokens of a step", amount=known.tokens_per_step, unit="tokens"),
            *([] if least is None else [Evidence(line="seconds of a step at the card's peak", amount=least, unit="s")]),
        ),
    )


def _baseline(account: Account) -> Found | None:
    told = account.told
    if told.baselines:
        return None
    message = (
        f"the run book {told.book} holds no baseline of this layout"
        if told.baselines is not None
        else f"there is no run book{f' {told.book}' if told.book else ''}: nothing says what this layout did before"
    )
    return Found(
        message=message,
        knob="measure one after each change of layout: trainledger baseline",
        evidence=(Evidence(line="baselines of this layout", amount=told.baselines, unit="", note=told.book),),
    )


def _unscaled(account: Account) -> Found | None:
    recipe, name = account.setting.recipe, account.setting.scenario.precision
    if recipe.activation != "fp16" or account.told.loss_scaling is not False:
        return None
    return Found(
        message=f"--precision {name} without loss scaling: gradients below 6e-8 are 0 in fp16",
        knob="--loss-scaling on, or --precision bf16",
        evidence=(Evidence(line="smallest number of fp16", amount=2**-24, unit=""),),
    )


def _initial(account: Account) -> Found | None:
    scale = account.told.initial_scale
    if account.setting.recipe.activation != "fp16" or scale is None or scale <= FP16_LARGEST + 32:
        return None
    skipped = math.ceil(math.log2(scale / FP16_LARGEST))
    return Found(
        message=(
            f"a loss of 1 times the initial scale {scale:g} is beyond 65504, the largest number of fp16: it is halved "
            f"once a step, so about {skipped} steps are skipped first"
        ),
        knob="--initial-scale 65536 or less",
        evidence=(Evidence(line="initial scale", amount=scale, unit=""),),
    )


def _underflow(account: Account) -> Found | None:
    """Weights that are stepped on in bf16 do not move by less than half of their last bit."""
    setting, rate = account.setting, account.told.learning_rate
    if setting.recipe.weight != "bf16" or setting.dtype("stepped") != "bf16" or setting.workload.lora_rank:
        return None
    knob = "--precision bf16, which keeps an fp32 copy or fp32 weights; or round stochastically"
    if rate is None:
        return Found(
            message=(
                f"--precision {setting.scenario.precision} steps on weights in bf16: one does not move where learning "
                "rate x update is below 2^-9 of it, and nobody said the learning rate"
            ),
            knob=f"--learning-rate; {knob}",
            evidence=(Evidence(line="least change of a weight of 1", amount=BF16_HALF_STEP, unit=""),),
            severity="advise",
        )
    if rate >= BF16_HALF_STEP:
        return None
    return Found(
        message=(
            f"an AdamW step moves a weight by about the learning rate, {rate:g}: in bf16 no weight beyond "
            f"{rate / BF16_HALF_STEP:.2g} moves, and norms are 1"
        ),
        knob=knob,
        evidence=(
            Evidence(line="learning rate", amount=rate, unit=""),
            Evidence(line="least change of a weight of 1", amount=BF16_HALF_STEP, unit=""),
        ),
    )


CHECKS: tuple[Check, ...] = (
    Check(id="fp16-without-scaling", severity="warn", source="Micikevicius et al. 2018, section 3.2", judge=_unscaled),
    Check(id="initial-scale", severity="warn", source="DeepSpeed runtime/fp16/loss_scaler.py 48-64", judge=_initial),
    Check(id="bf16-underflow", severity="warn", source="IEEE-like rounding to nearest with 8 bits", judge=_underflow),
    Check(id="budget-unsaid", severity="advise", source="the plan and what is told beside it", judge=_unsaid),
    Check(id="baseline-missing", severity="advise", source="the run book", judge=_baseline),
)
