"""Rules about what an engine, a recipe or a card can do at all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainledger.plans.plan import Plans, make_plans
from trainledger.plans.setting import Setting
from trainledger.profiles import engine_names, load_profile
from trainledger.profiles.profile import Precision
from trainledger.rules.rule import Mask, Rule

FROZEN_DTYPES = ("fp32", "bf16", "fp16")
"""What frameworks load weights in."""

AXES = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp_replicate")


def _precision_sentence(setting: Setting, row: dict[str, int]) -> str:
    return (
        f"--precision {setting.scenario.precision} is not a recipe of {setting.profile.name}; "
        f"use one of {', '.join(setting.profile.precision)}"
    )


def _optimizer_sentence(setting: Setting, row: dict[str, int]) -> str:
    return (
        f"--optimizer {setting.scenario.optimizer} is not one that {setting.profile.name} shards; "
        f"use one of {', '.join(setting.profile.optimizers)}"
    )


def _zero(setting: Setting, plans: Plans) -> Mask:
    return ~np.isin(plans.zero_stage, setting.profile.zero_stages)


def _zero_sentence(setting: Setting, row: dict[str, int]) -> str:
    stages = ", ".join(map(str, setting.profile.zero_stages))
    return f"--zero {row['zero_stage']} does not exist in {setting.profile.framework}; it has {stages}"


def _lacking(setting: Setting, plans: Plans) -> Iterator[tuple[str, Mask]]:
    """(axis, where it is used) of each axis that the engine lacks; etp is none of its own where it follows tp."""
    for axis in AXES:
        if axis not in setting.profile.axes:
            used = getattr(plans, axis) > 1
            yield axis, used & (plans.etp != plans.tp) if axis == "etp" else used


def _axes(setting: Setting, plans: Plans) -> Mask:
    broken = np.zeros(len(plans), dtype=np.bool_)
    for _, used in _lacking(setting, plans):
        broken |= used
    return broken


def _axes_sentence(setting: Setting, row: dict[str, int]) -> str:
    wrong = next(axis for axis, used in _lacking(setting, make_plans(row)) if used.any())
    return (
        f"--{wrong.replace('_', '-')} {row[wrong]} is not something {setting.profile.name} has; "
        f"set it to 1, or choose another --engine"
    )


def _sp(setting: Setting, plans: Plans) -> Mask:
    return (plans.sp == 1) & ("sp" not in setting.profile.axes)


def _grad_dtype(setting: Setting, plans: Plans) -> bool:
    chosen, recipe = setting.scenario.grad_dtype, setting.precision
    return bool(chosen) and recipe is not None and chosen not in (*recipe.grad_choices, recipe.grad)


def _grad_dtype_sentence(setting: Setting, row: dict[str, int]) -> str:
    choices = ", ".join(setting.recipe.grad_choices) or setting.recipe.grad
    return (
        f"--grad-dtype {setting.scenario.grad_dtype} is not possible with {setting.scenario.precision} in "
        f"{setting.profile.name}; use one of {choices}, or leave it out"
    )


def _frozen_dtype(setting: Setting, plans: Plans) -> bool:
    chosen = setting.scenario.frozen_dtype
    return bool(chosen) and chosen not in FROZEN_DTYPES


def _bucket(setting: Setting, plans: Plans) -> bool:
    size = setting.scenario.reduce_bucket
    return size < 0 or (size > 0 and not setting.profile.traffic.bucket_elements)


def _bucket_sentence(setting: Setting, row: dict[str, int]) -> str:
    size = setting.scenario.reduce_bucket
    if size < 0:
        return f"--reduce-bucket is {size}: a bucket has at least 1 element; write a larger number, or leave it out"
    have = ", ".join(name for name in engine_names() if load_profile(name).traffic.bucket_elements)
    return (
        f"--reduce-bucket {size}: {setting.profile.name} has no bucket of a fixed size; leave it out, "
        f"or use --engine with one of {have}"
    )


def _overlap(setting: Setting, plans: Plans) -> bool:
    return bool(setting.scenario.overlap_comm) and not any(row.overlap for row in setting.profile.state)


def _overlap_sentence(setting: Setting, row: dict[str, int]) -> str:
    have = ", ".join(name for name in engine_names() if any(row.overlap for row in load_profile(name).state))
    return (
        f"--overlap-comm {setting.scenario.overlap_comm}: {setting.profile.name} has no such setting that holds more; "
        f"leave it out, or use --engine with one of {have}"
    )


def _offload(setting: Setting, plans: Plans) -> bool:
    return bool(set(setting.scenario.offload) - set(setting.profile.offload))


def _offload_sentence(setting: Setting, row: dict[str, int]) -> str:
    wrong = sorted(set(setting.scenario.offload) - set(setting.profile.offload))
    can = ", ".join(setting.profile.offload) or "nothing"
    return f"--offload {','.join(wrong)} is not something {setting.profile.name} can do; it offloads {can}"


def _offload_zero(setting: Setting, plans: Plans) -> Mask:
    places = setting.profile.offload
    needs = max((places[place].zero for place in setting.scenario.offload if place in places), default=0)
    return plans.zero_stage < needs


def _offload_needs(setting: Setting, plans: Plans) -> bool:
    places, chosen = setting.profile.offload, setting.scenario.offload
    return any(places[p].needs and places[p].needs not in chosen for p in chosen if p in places)


def _offload_zero_sentence(setting: Setting, row: dict[str, int]) -> str:
    places = setting.profile.offload
    needs = ", ".join(
        f"{place} from zero_stage {places[place].zero}" for place in setting.scenario.offload if place in places
    )
    return f"--offload with --zero {row['zero_stage']}: {setting.profile.framework} offloads {needs}; raise --zero"


def _lora(setting: Setting, plans: Plans) -> bool:
    return setting.workload.lora_rank > 0 and not setting.profile.lora


def _lora_sentence(setting: Setting, row: dict[str, int]) -> str:
    others = ", ".join(name for name in engine_names() if load_profile(name).lora)
    return (
        f"--lora-rank {setting.workload.lora_rank}: adapters are not accounted for in {setting.profile.name}; "
        f"use --engine with one of {others}"
    )


def _cp_comm(setting: Setting, plans: Plans) -> bool:
    chosen = setting.scenario.cp_comm
    return bool(chosen) and chosen not in setting.profile.traffic.cp_choices


def _mtp(setting: Setting, plans: Plans) -> bool:
    return setting.workload.mtp and setting.model.mtp is None


def _lacks(setting: Setting, dtype: str) -> bool:
    """Whether the card is known and lacks a format; MissingFact where no source says."""
    return bool(dtype) and setting.accelerator is not None and not setting.accelerator.supports(dtype)


def _bf16(setting: Setting, plans: Plans) -> bool:
    recipe = setting.precision
    needs = recipe is not None and not recipe.accelerator_dtype and recipe.activation == "bf16"
    return needs and _lacks(setting, "bf16")


def _card_dtype(setting: Setting, plans: Plans) -> bool:
    recipe = setting.precision
    if recipe is None:
        return False
    needed = recipe.accelerator_dtype or (recipe.activation if recipe.activation == "fp16" else "")
    return _lacks(setting, needed)


def _card_dtype_sentence(setting: Setting, row: dict[str, int]) -> str:
    recipe = setting.recipe
    needed = recipe.accelerator_dtype or recipe.activation
    name = setting.accelerator.name if setting.accelerator is not None else ""
    return f"--precision {setting.scenario.precision} needs {needed} arithmetic and {name} has none; use another recipe"


def _least(recipe: Precision) -> tuple[int, ...]:
    return tuple(map(int, recipe.least_capability.split(".")))


def _capability(setting: Setting, plans: Plans) -> bool:
    card, recipe = setting.accelerator, setting.precision
    if card is None or recipe is None or not recipe.least_capability or not card.capability:
        return False
    return card.capability < _least(recipe)


def _capability_sentence(setting: Setting, row: dict[str, int]) -> str:
    card = setting.accelerator
    have = f"{card.name} has {'.'.join(map(str, card.capability))}" if card is not None else ""
    return (
        f"--precision {setting.scenario.precision} needs compute capability {setting.recipe.least_capability} "
        f"or newer and {have}; use another recipe or another card"
    )


RULES: tuple[Rule, ...] = (
    Rule(
        id="engine-precision",
        severity="refuse",
        scope="engine",
        source="the engine's profile",
        broken=lambda setting, plans: setting.precision is None,
        sentence=_precision_sentence,
    ),
    Rule(
        id="engine-optimizer",
        severity="refuse",
        scope="engine",
        source="the engine's profile",
        broken=lambda setting, plans: setting.scenario.optimizer not in setting.profile.optimizers,
        sentence=_optimizer_sentence,
    ),
    Rule(
        id="engine-grad-dtype",
        severity="refuse",
        scope="engine",
        source="the engine's profile",
        broken=_grad_dtype,
        sentence=_grad_dtype_sentence,
    ),
    Rule(
        id="engine-zero-stage",
        severity="refuse",
        scope="engine",
        source="the engine's profile",
        broken=_zero,
        sentence=_zero_sentence,
    ),
    Rule(
        id="engine-axis",
        severity="refuse",
        scope="engine",
        source="the engine's profile",
        broken=_axes,
        sentence=_axes_sentence,
    ),
    Rule(
        id="frozen-dtype",
        severity="refuse",
        scope="engine",
        source="dtypes that frameworks load weights in",
        broken=_frozen_dtype,
        sentence=lambda setting, row: (
            f"--frozen-dtype {setting.scenario.frozen_dtype} is not a dtype weights are loaded in; "
            f"use one of {', '.join(FROZEN_DTYPES)}, or --qlora for 4 bits"
        ),
    ),
    Rule(
        id="engine-bucket",
        severity="refuse",
        scope="engine",
        source="the engine's profile",
        broken=_bucket,
        sentence=_bucket_sentence,
    ),
    Rule(
        id="engine-overlap",
        severity="refuse",
        scope="engine",
        source="DeepSpeed runtime/zero/stage_1_and_2.py at edaa722, backward",
        broken=_overlap,
        sentence=_overlap_sentence,
    ),
    Rule(
        id="engine-sp",
        severity="refuse",
        scope="engine",
        source="the engine's profile",
        broken=_sp,
        sentence="--sp: {framework} has no sequence parallelism beside its tensor parallelism; leave it out",
    ),
    Rule(
        id="engine-offload",
        severity="refuse",
        scope="engine",
        source="the engine's profile",
        broken=_offload,
        sentence=_offload_sentence,
    ),
    Rule(
        id="offload-needs-zero",
        severity="refuse",
        scope="engine",
        source="DeepSpeed runtime/zero/config.py at edaa722; PyTorch CPUOffloadPolicy is FSDP2's",
        broken=_offload_zero,
        sentence=_offload_zero_sentence,
    ),
    Rule(
        id="offload-needs-both",
        severity="refuse",
        scope="engine",
        source="DeepSpeed runtime/zero/stage3.py at edaa722: parameters count only beside the optimizer",
        broken=_offload_needs,
        sentence=(
            "--offload {offload}: {framework} offloads parameters only together with the optimizer; "
            "use --offload optimizer,parameters"
        ),
    ),
    Rule(
        id="engine-lora",
        severity="refuse",
        scope="engine",
        source="the engine's profile",
        broken=_lora,
        sentence=_lora_sentence,
    ),
    Rule(
        id="engine-cp-comm",
        severity="refuse",
        scope="engine",
        source="the engine's profile",
        broken=_cp_comm,
        sentence=lambda setting, row: (
            f"--cp-comm {setting.scenario.cp_comm} is not something {setting.profile.name} has; "
            f"use one of {', '.join(setting.profile.traffic.cp_choices)}"
        ),
    ),
    Rule(
        id="mtp-needs-layers",
        severity="refuse",
        scope="model",
        source="the model's config",
        broken=_mtp,
        sentence="--mtp but {model} has no multi-token-prediction layers; leave the flag out",
    ),
    Rule(
        id="fp8-sm",
        severity="refuse",
        scope="engine",
        source="TransformerEngine pytorch/quantization.py at d0067d0",
        broken=_capability,
        sentence=_capability_sentence,
    ),
    Rule(
        id="bf16-on-volta",
        severity="refuse",
        scope="engine",
        source="the accelerator's data file; bf16 needs compute capability 8.0",
        broken=_bf16,
        sentence=_card_dtype_sentence,
    ),
    Rule(
        id="card-has-dtype",
        severity="refuse",
        scope="engine",
        source="the accelerator's data file",
        broken=_card_dtype,
        sentence=_card_dtype_sentence,
    ),
)
