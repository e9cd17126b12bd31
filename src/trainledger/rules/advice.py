"""What runs and fits, and still costs more than its user may think: adapters, experts under ZeRO-3, buckets."""

from __future__ import annotations

import numpy as np

from trainledger.arrays import ints
from trainledger.dtypes import bytes_of
from trainledger.plans import sharding
from trainledger.plans.plan import Plans
from trainledger.plans.setting import Setting
from trainledger.rules.rule import Mask, Rule

ADAM_STATE_BYTES = 12
"""Master and two moments of a parameter under mixed precision. [zero-paper: section 3.1]"""
BUCKET_COPIES = 2
"""A bucket and its flattened copy. [deepspeed-z12]"""


def _adapters(setting: Setting) -> bool:
    return setting.workload.lora_rank > 0


def _gathers_frozen(setting: Setting, plans: Plans) -> Mask:
    return (plans.zero_stage == 3) & (_adapters(setting) and not setting.workload.qlora)


def _fp32_base(setting: Setting, plans: Plans) -> bool:
    wide = setting.precision is not None and setting.dtype("frozen") == "fp32"
    return _adapters(setting) and not setting.workload.qlora and wide


def _upcast(setting: Setting, plans: Plans) -> Mask:
    narrow = setting.precision is not None and setting.dtype("frozen") != "fp32"
    return (plans.zero_stage > 0) & (_adapters(setting) and narrow)


def _unquantised(setting: Setting) -> str:
    """What 4-bit storage leaves over is kept in this dtype: trl's sft_trainer.py asks is_sharded_qlora first."""
    if setting.scenario.frozen_dtype:
        return setting.scenario.frozen_dtype
    if not setting.prepared:
        return setting.dtype("frozen")
    if setting.profile.name != "pytorch":
        return "fp32"
    return "fp32, as peft prepares them; trl and axolotl do not where FSDP divides the model: give --frozen-dtype bf16"


def _gathers_experts(setting: Setting, plans: Plans) -> Mask:
    moe = any(block.moe is not None for block in setting.model.blocks)
    return (plans.zero_stage == 3) & (plans.ep == 1) & moe


def _bucket_outweighs(setting: Setting, plans: Plans) -> Mask | bool:
    """Buckets of stages 1 and 2 against what dividing the optimizer saves on one rank."""
    if not setting.bucket_elements or _adapters(setting):
        return False
    group = sharding.shard_group(plans, expert=False)
    owned = setting.model.total_params // (plans.tp * plans.pp)
    saved = ADAM_STATE_BYTES * (owned - owned // group)
    held = int(bytes_of(ints(BUCKET_COPIES * setting.bucket_elements), setting.dtype("reduce"))[0])
    return np.isin(plans.zero_stage, (1, 2)) & (held > saved)


RULES: tuple[Rule, ...] = (
    Rule(
        id="z3-for-lora",
        severity="advise",
        scope="plan",
        source="frozen weights are gathered for every use, twice per micro-batch",
        broken=_gathers_frozen,
        sentence=(
            "--zero 3 with adapters of rank {lora_rank} gathers all frozen weights twice per "
            "micro-batch; where they fit whole, use --zero 2"
        ),
    ),
    Rule(
        id="fp32-base-for-lora",
        severity="warn",
        scope="plan",
        source="transformers loads in fp32 unless told a dtype",
        broken=_fp32_base,
        sentence=(
            "the frozen weights beside the adapters are held in fp32, twice what training them needs; "
            "use --frozen-dtype bf16"
        ),
        offered=True,
    ),
    Rule(
        id="fsdp2-upcast-frozen",
        severity="advise",
        scope="engine",
        source="accelerate 1.15 utils/fsdp_utils.py 816-820",
        broken=_upcast,
        sentence=lambda setting, row: (
            f"frozen weights are counted in {setting.dtype('frozen')}; accelerate's FSDP2 path casts them to fp32: "
            "launched through it, give --frozen-dtype fp32"
        ),
        engines=("pytorch", "torchtitan"),
    ),
    Rule(
        id="qlora-upcast",
        severity="advise",
        scope="plan",
        source="peft prepare_model_for_kbit_training",
        broken=lambda setting, plans: setting.workload.qlora,
        sentence=lambda setting, row: (
            f"--qlora: embeddings, norms and the output layer stay unquantised, in {_unquantised(setting)}; scales are "
            "quantised twice (bnb_4bit_use_double_quant), without which a weight takes 0.05 B more"
        ),
    ),
    Rule(
        id="z3-moe-gathers-all",
        severity="advise",
        scope="plan",
        source="every routed expert is gathered, visited or not",
        broken=_gathers_experts,
        sentence=("--zero 3 with ep=1 gathers every routed expert of a layer for each use, visited or not; raise --ep"),
    ),
    Rule(
        id="ds-bucket-larger-than-saving",
        severity="warn",
        scope="engine",
        source="DeepSpeed runtime/zero/stage_1_and_2.py 828-835, 1841 at edaa722",
        broken=_bucket_outweighs,
        sentence=lambda setting, row: (
            f"two buckets of {setting.bucket_elements:,} elements are more than --zero {row['zero_stage']} saves here; "
            f"use --reduce-bucket {max(setting.model.hidden_size**2, 1)}, or --zero 0"
        ),
        offered=True,
    ),
)
