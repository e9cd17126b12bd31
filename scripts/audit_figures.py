"""The figures behind docs/rules-of-thumb.md: what the accounts say about each audited claim, as numbers.

Functions return plain rows; scripts/pages/rules_of_thumb.py puts them into sentences and tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from trainledger.account.ledger import entry
from trainledger.account.memory import stage_memory
from trainledger.account.peak import peak_of
from trainledger.account.states import StateAccount, state_account
from trainledger.account.traffic import wire_totals
from trainledger.facts.by_hand import model_from_count
from trainledger.facts.cluster import find_accelerator
from trainledger.facts.model import Model
from trainledger.facts.model_load import load_model
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Plans, Scenario, make_plans
from trainledger.plans.setting import Setting, make_setting
from trainledger.profiles import load_profile
from trainledger.profiles.profile import Category
from trainledger.rules import RULES, findings

SEVENTY = 70 * 10**9
PROBE = 720_720 * 1024
"""Parameters that every number of ranks up to 16, and every power of two, divides: no share is rounded."""
HOPPER, BLACKWELL = "H100-SXM5-80GB", "B200-SXM"
STAGES = (0, 1, 2, 3)


def setting_of(model: Model, scenario: Mapping[str, str], card: str = "") -> Setting:
    """A setting of the default workload: full training, sequences of the default length, one at a time."""
    accelerator = find_accelerator(card) if card else None
    return make_setting(model, Workload(), Scenario(**scenario), accelerator=accelerator)  # type: ignore[arg-type]


class Held(NamedTuple):
    """Bytes of one rank by category."""

    what: str
    engine: str
    weights: int
    gradients: int
    optimizer: int


def optimizer_copies() -> list[Held]:
    """States of a 70B model, nothing divided, by what the optimizer keeps."""
    cases = (
        ("two 16-bit moments, no master", {"engine": "paper", "precision": "bf16-pure"}),
        ("two 16-bit moments, low half of an fp32 master", {"engine": "megatron", "optimizer": "adamw-bf16"}),
        ("two fp32 moments, fp32 weights", {"engine": "pytorch", "precision": "fp32"}),
        ("two fp32 moments, fp32 master", {"engine": "paper"}),
    )
    rows: list[Held] = []
    for what, scenario in cases:
        account = state_account(Inventory(setting_of(model_from_count(SEVENTY), scenario)), make_plans({}))
        held: list[Category] = ["weights", "gradients", "optimizer"]
        rows.append(Held(what, scenario["engine"], *(int(account.largest(category).max()) for category in held)))
    return rows


class Share(NamedTuple):
    """What the weights are of a rank's memory at its peak."""

    model: str
    engine: str
    plan: str
    weights: int
    total: int


SHARE_CASES: tuple[tuple[str, dict[str, str], dict[str, int]], ...] = (
    ("llama-2-7b", {"engine": "paper"}, {"dp_shard": 8, "zero_stage": 0}),
    ("llama-2-7b", {"engine": "paper"}, {"dp_shard": 8, "zero_stage": 1}),
    ("llama-2-7b", {"engine": "paper"}, {"dp_shard": 64, "zero_stage": 2}),
    ("llama-2-13b", {"engine": "pytorch", "precision": "fp32"}, {"dp_shard": 8, "zero_stage": 0}),
    ("llama-2-13b", {"engine": "pytorch"}, {"dp_shard": 64, "zero_stage": 3}),
    ("llama-3-70b", {"engine": "deepspeed"}, {"dp_shard": 64, "zero_stage": 3}),
    (
        "llama-3-70b",
        {"engine": "megatron", "recompute": "none"},
        {"tp": 8, "sp": 1, "pp": 4, "dp_shard": 2, "zero_stage": 1, "num_microbatches": 16},
    ),
)


def weight_shares() -> list[Share]:
    """Weights at the peak of the rank that holds most, activations included."""
    rows: list[Share] = []
    for name, scenario, columns in SHARE_CASES:
        inventory, plans = Inventory(setting_of(load_model(name), scenario)), make_plans(columns)
        account = state_account(inventory, plans)
        peak = peak_of(stage_memory(inventory, plans))
        where = int(np.argmax(account.pp_stage[0] == peak.pp_stage))
        weights = int(account.held["weights", peak.instant][0, where])
        degrees = [f"{axis.split('_')[0]} {columns[axis]}" for axis in ("tp", "pp", "dp_shard") if axis in columns]
        plan = f"ZeRO-{columns['zero_stage']}, {', '.join(degrees)}"
        rows.append(Share(name, scenario["engine"], plan, weights, peak.total_bytes))
    return rows


def stage_share(ranks: int, zero_stage: int) -> Fraction:
    """What one card holds of the states under a zero_stage, by the paper."""
    setting = setting_of(model_from_count(PROBE), {"engine": "paper"})
    account = state_account(Inventory(setting), make_plans({"dp_shard": ranks, "zero_stage": [0, zero_stage]}))
    whole, held = (int(account.at("rest")[row].max()) for row in account.index)
    return Fraction(held, whole)


def ranks_where(zero_stage: int, share: Fraction, most: int = 16) -> int:
    """The fewest ranks at which a zero_stage leaves no more than a share, or 0 if `most` are not enough."""
    return next((n for n in range(1, most + 1) if stage_share(n, zero_stage) <= share), 0)


def traffic_ratios(ranks: int, micro_batches: int) -> dict[str, dict[int, float]]:
    """Data-parallel bytes per card and step by engine and zero_stage, over a 16-bit all-reduce of the gradients."""
    model = load_model("llama-2-7b")
    once = make_plans({"dp_shard": ranks, "zero_stage": 0})
    unit = float(wire_totals(Inventory(setting_of(model, {"engine": "paper"})), once)[1].max())
    ratios: dict[str, dict[int, float]] = {}
    for engine in ("paper", "deepspeed", "megatron", "pytorch", "torchtitan"):
        stages = load_profile(engine).zero_stages
        plans = make_plans({"dp_shard": ranks, "zero_stage": list(stages), "num_microbatches": micro_batches})
        moved = wire_totals(Inventory(setting_of(model, {"engine": engine})), plans)[1].max(axis=1)
        ratios[engine] = {stage: float(total) / unit for stage, total in zip(stages, moved, strict=True)}
    return ratios


class Fp8(NamedTuple):
    """Bytes per parameter under a recipe, nothing divided, at the end of backward; of_bf16 compares `total`."""

    recipe: str
    card: str
    weights: float
    gradients: float
    total: float
    of_bf16: float


FP8_CASES = (
    ("torchao tensorwise", {"engine": "pytorch", "precision": "fp8-tensorwise"}, HOPPER),
    ("torchao rowwise", {"engine": "pytorch", "precision": "fp8-rowwise"}, HOPPER),
    ("TransformerEngine delayed", {"engine": "megatron", "precision": "fp8-delayed"}, HOPPER),
    ("TransformerEngine delayed", {"engine": "megatron", "precision": "fp8-delayed"}, BLACKWELL),
    ("TransformerEngine blockwise", {"engine": "megatron", "precision": "fp8-blockwise"}, HOPPER),
    ("TransformerEngine MXFP8", {"engine": "megatron", "precision": "mxfp8"}, BLACKWELL),
    ("FP8-LM", {"engine": "paper", "precision": "fp8-lm", "optimizer": "adamw-msamp-o2"}, HOPPER),
)


def fp8_recipes() -> list[Fp8]:
    """Each recipe beside bf16 in the same engine, on a 70B model."""
    model = load_model("llama-3-70b")
    rows: list[Fp8] = []
    for recipe, scenario, card in FP8_CASES:
        setting = setting_of(model, scenario, card)
        weights, gradients, total = _per_param(setting)
        plain = _per_param(setting_of(model, {"engine": scenario["engine"]}, card))[2]
        rows.append(Fp8(recipe, find_accelerator(card).name, weights, gradients, total, total / plain))
    return rows


def _per_param(setting: Setting) -> tuple[float, float, float]:
    """(weights, gradients, all states) in bytes per parameter at the end of backward."""
    account: StateAccount = state_account(Inventory(setting), make_plans({"zero_stage": 0}))
    params = setting.model.total_params
    weights, gradients = (int(account.held[kind, "backward"].max()) / params for kind in ("weights", "gradients"))
    return weights, gradients, int(account.at("backward").max()) / params


class Format(NamedTuple):
    """A floating-point format. finite_only: no infinities, and only the top mantissa pattern is not a number."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    finite_only: bool = False

    @property
    def largest(self) -> float:
        """The largest finite number. [IEEE 754; OCP 8-bit floating point specification for e4m3]"""
        bias = 2 ** (self.exponent_bits - 1) - 1
        top = 2**self.exponent_bits - 1 - bias
        if self.finite_only:
            return (2 - 2 * 2.0**-self.mantissa_bits) * 2.0**top
        return (2 - 2.0**-self.mantissa_bits) * 2.0 ** (top - 1)

    @property
    def smallest_normal(self) -> float:
        """The smallest number with all its mantissa bits."""
        return 2.0 ** (2 - 2 ** (self.exponent_bits - 1))


FORMATS = (
    Format("fp32", 8, 23),
    Format("bf16", 8, 7),
    Format("fp16", 5, 10),
    Format("fp8 e5m2", 5, 2),
    Format("fp8 e4m3", 4, 3, finite_only=True),
)

FIT_CARDS = {
    "llama-2-7b": (8, 16, 32, 64),
    "llama-2-13b": (8, 16, 32, 64),
    "llama-3-70b": (8, 16, 32, 64),
    "llama-3.1-405b": (64, 512),
}


def held_by_plain_zero(model: str) -> dict[tuple[int, int], int]:
    """(cards, zero_stage) -> bytes at the peak of one card: the paper's states and activations, full recompute."""
    inventory = Inventory(setting_of(load_model(model), {"engine": "paper"}))
    keys = [(cards, stage) for cards in FIT_CARDS[model] for stage in STAGES]
    plans = make_plans({"dp_shard": [cards for cards, _ in keys], "zero_stage": [stage for _, stage in keys]})
    return dict(zip(keys, map(int, stage_memory(inventory, plans).allocated), strict=True))


def usable_bytes() -> int:
    """What an H100 has for a program."""
    return find_accelerator(HOPPER).usable_bytes


LAYOUT = {"tp": 8, "pp": 4, "dp_shard": 2, "num_microbatches": 16}


def layout_traffic() -> dict[str, int]:
    """Bytes per card and step by axis for a 70B model under LAYOUT in Megatron, ZeRO-1, with sequence parallelism."""
    inventory = Inventory(setting_of(load_model("llama-3-70b"), {"engine": "megatron"}))
    moved: dict[str, int] = {}
    for call in entry(inventory, make_plans({**LAYOUT, "sp": 1, "zero_stage": 1})).traffic:
        axis = call.group.removesuffix("_shard")
        moved[axis] = moved.get(axis, 0) + call.wire_bytes
    return moved


def layout_data_traffic() -> dict[int, float]:
    """Data-parallel bytes per card and step by zero_stage under LAYOUT, by the paper."""
    inventory = Inventory(setting_of(load_model("llama-3-70b"), {"engine": "paper"}))
    plans: Plans = make_plans({**LAYOUT, "zero_stage": list(STAGES)})
    return dict(zip(STAGES, map(float, wire_totals(inventory, plans)[1].max(axis=1)), strict=True))


def refusal(rule: str) -> str:
    """What the named rule says of LAYOUT with ZeRO-3 in DeepSpeed."""
    setting = setting_of(load_model("llama-3-70b"), {"engine": "deepspeed"})
    found = findings(RULES, setting, make_plans({**LAYOUT, "zero_stage": 3}))
    return next(finding.message for finding in found if finding.rule == rule)
