"""Model states per card by the rule of thumb: the ZeRO paper's division of so many bytes per parameter."""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np

from trainledger.account.states import state_account
from trainledger.errors import BadInput, UnknownName
from trainledger.facts.by_hand import model_from_count
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import DEGREE_LIMIT, Scenario, make_plans
from trainledger.plans.setting import Setting
from trainledger.profiles import load_profile
from trainledger.profiles.profile import Moment, Optimizer, Precision

Convention = Literal["mixed", "published"]
CONVENTIONS: tuple[Convention, ...] = ("mixed", "published")
RECIPE = "rule of thumb"
MOST_BILLIONS = 10**6

ADAM = Optimizer(
    source="Kingma & Ba 2015, algorithm 1, with both moments in fp32 whatever the weights are kept in",
    moments=(Moment(what="exp_avg", dtype="fp32"), Moment(what="exp_avg_sq", dtype="fp32")),
)

PUBLISHED_OPTIMIZER_BYTES = 8
PUBLISHED_WEIGHT_BYTES = {False: 2, True: 1}
"""By whether FP8 is on; the published function takes the same for gradients."""


def zero_mem(
    n_params_b: float,
    gpus: int,
    zero_stage: int,
    fp8: bool = False,
    master: bool = True,
    convention: Convention = "mixed",
) -> float:
    """Decimal GB of weights, gradients and optimizer states on one of `gpus` cards, rounded to 0.1.

    n_params_b is in billions. Nothing but states is counted: no activations, no buffers.

    mixed       mixed-precision Adam: weights 2 bytes (1 with FP8), gradients 2, fp32 master 4 (none without `master`),
                moments 4 + 4; zero_stage 1 divides master and moments, 2 gradients too, 3 weights too
                [zero-paper: sections 3.1 and 5]
    published   a much-copied function as it is: weights and gradients 2 bytes each (1 with FP8), optimizer 8, no
                master; its stage 2 divides the weights as well, so it equals its stage 3

    >>> [zero_mem(70, 64, stage) for stage in (0, 1, 2, 3)]
    [1120.0, 293.1, 155.3, 17.5]
    >>> zero_mem(70, 64, 3, fp8=True), zero_mem(70, 64, 3, fp8=True, convention="published")
    (16.4, 10.9)
    """
    if convention not in CONVENTIONS:
        raise UnknownName("convention", str(convention), CONVENTIONS)
    _check(n_params_b, gpus, zero_stage)
    if convention == "published":
        amount_gb = _published(n_params_b, gpus, zero_stage, fp8=bool(fp8))
    else:
        amount_gb = _mixed(round(n_params_b * 10**9), gpus, zero_stage, fp8=bool(fp8), master=bool(master))
    return round(amount_gb, 1)


def _check(n_params_b: float, gpus: int, zero_stage: int) -> None:
    if isinstance(n_params_b, bool) or not isinstance(n_params_b, int | float) or not math.isfinite(n_params_b):
        raise BadInput(f"n_params_b is {n_params_b!r}: it takes a number of billions; write 70 for 70e9 parameters")
    if n_params_b * 10**9 < 1 or n_params_b > MOST_BILLIONS:
        raise BadInput(
            f"n_params_b is {n_params_b!r}: it is in billions, from 1e-9 to {MOST_BILLIONS}; "
            "write 70 for 70e9 parameters"
        )
    for name, value, least, most, knob in (
        ("gpus", gpus, 1, DEGREE_LIMIT, "give the cards that share the states"),
        ("zero_stage", zero_stage, 0, 3, "0 divides nothing, 1 optimizer states, 2 gradients too, 3 weights too"),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise BadInput(f"{name} is {value!r}: it takes a whole number from {least} to {most}; {knob}")


def _mixed(num_params: int, gpus: int, zero_stage: int, *, fp8: bool, master: bool) -> float:
    """By the account of the ZeRO paper, under a recipe of these dtypes."""
    recipe = Precision(
        weight="fp8" if fp8 else "bf16",
        grad="bf16",
        master="fp32" if master else "",
        gathered="bf16",
        reduce="bf16",
        activation="bf16",
    )
    setting = Setting(
        model=model_from_count(num_params),
        workload=Workload(),
        scenario=Scenario(engine="paper", precision=RECIPE),
        profile=msgspec.structs.replace(load_profile("paper"), precision={RECIPE: recipe}),
        optimizer=ADAM,
    )
    account = state_account(Inventory(setting), make_plans({"dp_shard": gpus, "zero_stage": zero_stage}))
    return int(np.max(account.at("rest"))) / 10**9


def _published(billions: float, gpus: int, zero_stage: int, *, fp8: bool) -> float:
    """The published function, division by division."""
    weights = gradients = PUBLISHED_WEIGHT_BYTES[fp8] * billions
    optimizer = PUBLISHED_OPTIMIZER_BYTES * billions
    match zero_stage:
        case 0:
            return weights + gradients + optimizer
        case 1:
            return weights + gradients + optimizer / gpus
        case _:
            return (weights + gradients) / gpus + optimizer / gpus
