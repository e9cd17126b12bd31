"""Every named rule: a plan that passes, one that breaks it, and a sentence with the value, the rule and the knob."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import checked_rules
import runtime_rules
from strategies import dense, latent, llama, routed, setting_of
from trainledger.errors import Refused
from trainledger.facts.by_hand import model_from_count
from trainledger.facts.cluster import find_accelerator, find_cluster
from trainledger.facts.model import Model
from trainledger.facts.workload import Workload
from trainledger.plans.plan import Plans, Scenario, make_plans
from trainledger.plans.setting import Setting, make_setting
from trainledger.rules import PLANNER, REFUSALS, RULES, RUNTIME, findings, require, violations

BY_ID = {rule.id: rule for rule in RULES}


class Case(NamedTuple):
    """What differs between a plan that passes and one that does not; words that the sentence must say.

    sound   the model of the plan that passes, where it is the model that does not
    """

    good: dict[str, Any]
    bad: dict[str, Any]
    words: tuple[str, ...]
    model: Model = dense()
    sound: Model | None = None


COLUMNS = tuple(Plans.__dataclass_fields__)
LORA = Workload(lora_rank=8, lora_targets=("all-linear",))
QLORA = Workload(lora_rank=8, lora_targets=("all-linear",), qlora=True)
COUNT = model_from_count(10**9)
MG, DS, TT, PT = ({"engine": name} for name in ("megatron", "deepspeed", "torchtitan", "pytorch"))
NT = {"engine": "nanotron", "zero_stage": 1}
H100, V100, A100 = ({"card": name} for name in ("H100-SXM5-80GB", "V100-SXM2-32GB", "A100-SXM4-80GB"))
HOST = {"offload": ("optimizer",)}
ZERO_BUBBLE = {"pp": 2, "num_microbatches": 2, "schedule": "zero-bubble", "recompute": "none"}

CASES: dict[str, Case] = {
    "engine-precision": Case(MG, {**MG, "precision": "fp8-rowwise"}, ("fp8-rowwise", "megatron", "bf16")),
    "engine-optimizer": Case(MG, {**MG, "optimizer": "adafactor"}, ("adafactor", "megatron", "adamw")),
    "engine-grad-dtype": Case(
        {**MG, "grad_dtype": "bf16"}, {**MG, "grad_dtype": "fp16"}, ("--grad-dtype fp16", "fp32, bf16")
    ),
    "engine-zero-stage": Case({**TT, "zero_stage": 2}, {**TT, "zero_stage": 1}, ("--zero 1", "torchtitan", "0, 2, 3")),
    "engine-axis": Case(DS, {**DS, "dp_replicate": 2, "zero_stage": 3}, ("--dp-replicate 2", "deepspeed", "1")),
    "engine-sp": Case({**MG, "sp": 1, "tp": 2}, {**DS, "sp": 1, "tp": 2}, ("--sp", "DeepSpeed", "leave it out")),
    "engine-offload": Case(
        {**PT, "zero_stage": 3, "offload": ("parameters",)},
        {**PT, "zero_stage": 3, **HOST},
        ("optimizer", "parameters"),
    ),
    "offload-needs-zero": Case(
        {**DS, **HOST, "zero_stage": 1},
        {**DS, **HOST, "zero_stage": 0},
        ("--zero 0", "stage 1", "raise --zero"),
    ),
    "offload-needs-both": Case(
        {"engine": "deepspeed-estimator", "zero_stage": 3, "offload": ("optimizer", "parameters")},
        {"engine": "deepspeed-estimator", "zero_stage": 3, "offload": ("parameters",)},
        ("parameters", "optimizer,parameters"),
    ),
    "engine-lora": Case({**PT, "workload": LORA}, {**MG, "workload": LORA}, ("--lora-rank 8", "megatron", "pytorch")),
    "engine-cp-comm": Case(
        {**MG, "cp_comm": "ring"}, {**TT, "cp_comm": "ring"}, ("--cp-comm ring", "torchtitan", "all_gather")
    ),
    "engine-model": Case(NT, NT, ("experts", "nanotron", "another --engine"), model=routed(), sound=dense()),
    "engine-loss": Case({**MG, "loss": "fused"}, {**MG, "loss": "chunked"}, ("chunked", "vocab-parallel, fused")),
    "loss-chunks": Case({**TT, "loss": "chunked", "loss_chunks": 4}, {**TT, "loss_chunks": 4}, ("--loss-chunks 4",)),
    "allocator": Case({**TT, "allocator": "expandable"}, {**TT, "allocator": "growing"}, ("growing", "expandable")),
    "routing": Case({"routing": "worst"}, {"routing": "worst"}, ("--routing worst", "no routed"), sound=routed()),
    "engine-compile": Case({**TT, "compile": "on"}, {**MG, "compile": "on"}, ("--compile on", "one way", "torchtitan")),
    "engine-recompute": Case(
        {**TT, "framework_version": "2025-12", "recompute": "every-2"},
        {**TT, "recompute": "every-2"},
        ("--recompute every-2", "none, full, selective", "--engine torchtitan --framework-version 2026-01-27"),
    ),
    "engine-selective": Case(
        {**MG, "recompute": "selective"}, {**DS, "recompute": "selective"}, ("selective", "none or full", "megatron")
    ),
    "recompute-parts": Case(
        {**MG, "recompute": "selective", "recompute_parts": ("mlp",)},
        {**MG, "recompute": "selective", "recompute_parts": ("mlp", "router")},
        ("mlp,router", "core_attn, mlp"),
    ),
    "recompute-layers": Case(
        {**MG, "recompute": "full", "recompute_layers": 2},
        {**MG, "recompute": "none", "recompute_layers": 2},
        ("--recompute-layers 2", "--recompute full"),
    ),
    "mtp-needs-layers": Case({}, {"workload": Workload(mtp=True)}, ("--mtp", "dense", "leave the flag out")),
    "fp8-sm": Case(
        {**MG, "precision": "fp8-delayed", **H100},
        {**MG, "precision": "fp8-delayed", **A100},
        ("fp8-delayed", "8.9", "8.0", "another card"),
    ),
    "bf16-on-volta": Case({**PT, **A100}, {**PT, **V100}, ("bf16", "V100", "another recipe")),
    "card-has-dtype": Case(
        {"precision": "fp8-lm", **H100}, {"precision": "fp8-lm", **A100}, ("fp8-lm", "A100", "another recipe")
    ),
    "shapes-known": Case({}, {"tp": 2}, ("tp=2", "config.json"), COUNT),
    "optimizer-needs-shapes": Case({}, {"optimizer": "adafactor"}, ("--optimizer adafactor", "use adamw"), COUNT),
    "precision-needs-shapes": Case(
        {**MG, "precision": "bf16"},
        {**MG, "precision": "fp8-delayed"},
        ("fp8-delayed", "config.json", "bf16"),
        COUNT,
    ),
    "frozen-dtype": Case({"frozen_dtype": "fp32"}, {"frozen_dtype": "fp8"}, ("fp8", "fp32, bf16, fp16", "--qlora")),
    "engine-bucket": Case(
        {**DS, "reduce_bucket": 5}, {"reduce_bucket": 5}, ("--reduce-bucket 5", "paper", "leave it out")
    ),
    "ds-offload-optimizer": Case(
        {**DS, **HOST, "zero_stage": 1},
        {**DS, **HOST, "zero_stage": 1, "optimizer": "sgd"},
        ("sgd", "--optimizer adamw"),
    ),
    "ds-untested-optimizer": Case(
        {**DS, "zero_stage": 1},
        {**DS, "zero_stage": 1, "optimizer": "sgd"},
        ("sgd", "zero_allow_untested_optimizer"),
    ),
    "z3-for-lora": Case(
        {"zero_stage": 2, "workload": LORA}, {"zero_stage": 3, "workload": LORA}, ("rank 8", "use --zero 2")
    ),
    "fp32-base-for-lora": Case(
        {"workload": LORA}, {"workload": LORA, "frozen_dtype": "fp32"}, ("fp32", "--frozen-dtype bf16")
    ),
    "fsdp2-upcast-frozen": Case(
        {**PT, "zero_stage": 3, "workload": LORA, "frozen_dtype": "fp32"},
        {**PT, "zero_stage": 3, "workload": LORA},
        ("bf16", "--frozen-dtype fp32"),
    ),
    "qlora-upcast": Case({"workload": LORA}, {"workload": Workload(lora_rank=8, qlora=True)}, ("--qlora", "fp32")),
    "z3-moe-gathers-all": Case(
        {"zero_stage": 3, "ep": 2, "dp_shard": 2}, {"zero_stage": 3}, ("ep=1", "raise --ep"), routed()
    ),
    "ds-bucket-larger-than-saving": Case(
        {**DS, "zero_stage": 1, "dp_shard": 8, "reduce_bucket": 1},
        {**DS, "zero_stage": 1, "dp_shard": 8},
        ("500,000,000", "--zero 1", "--reduce-bucket"),
    ),
    "largest-layer-known": Case(
        {"engine": "deepspeed-estimator", "zero_stage": 2},
        {"engine": "deepspeed-estimator", "zero_stage": 3},
        ("deepspeed-estimator", "--zero 3", "--largest-layer"),
        COUNT,
    ),
    "heads-divisible-by-tp": Case({"tp": 8}, {"tp": 3}, ("tp=3", "8", "1, 2, 4, 8")),
    "width-divisible-by-tp": Case({"tp": 4}, {"tp": 64}, ("tp=64", "96", "1, 2, 4, 8")),
    "ep-needs-experts": Case({"ep": 1}, {"ep": 2, "dp_shard": 2}, ("ep=2", "dense", "set ep to 1")),
    "experts-divisible-by-ep": Case({"ep": 4}, {"ep": 3}, ("ep=3", "8 routed experts", "1, 2, 4, 8"), routed()),
    "expert-width-divisible-by-etp": Case({"etp": 2}, {"etp": 64}, ("etp=64", "96"), routed()),
    "pp-layout-adds-up": Case(
        {"pp": 2, "pp_layout": (1, 3)},
        {"pp": 2, "pp_layout": (1, 2)},
        ("1,2", "3 layers", "4 layers", "--pp-layout"),
    ),
    "layers-divisible-by-pp": Case({**MG, "pp": 4}, {**MG, "pp": 3}, ("pp=3", "remainder 1", "1, 2, 4", "--pp-layout")),
    "layers-divisible-by-pp-vpp": Case(
        {**MG, "pp": 2, "vpp": 2}, {**MG, "pp": 2, "vpp": 4}, ("vpp=4", "2 layers", "remainder 2", "1, 2")
    ),
    "vpp-needs-interleaved": Case(
        {"pp": 2, "vpp": 2, "schedule": "interleaved"},
        {"pp": 2, "vpp": 2},
        ("vpp=2", "--schedule interleaved"),
    ),
    "gbs-divisible": Case(
        {"workload": Workload(gbs=12), "dp_shard": 4, "mbs": 3},
        {"workload": Workload(gbs=10), "dp_shard": 4, "mbs": 3},
        ("--gbs 10", "3 x 4 = 12", "remainder 10", "use --gbs 12"),
    ),
    "batch-identity": Case(
        {**DS, "workload": Workload(gbs=12), "dp_shard": 4, "mbs": 3},
        {**DS, "workload": Workload(gbs=10), "dp_shard": 4, "mbs": 3},
        ("--gbs 10", "train_batch_size", "3 x 4 = 12"),
    ),
    "interleaved-needs-vpp": Case(
        {**MG, "pp": 2, "vpp": 2, "schedule": "interleaved"},
        {**MG, "pp": 2, "schedule": "interleaved"},
        ("--schedule interleaved", "vpp=1", "--vpp 2", "1f1b"),
    ),
    "interleaved-microbatches": Case(
        {"pp": 4, "vpp": 2, "num_microbatches": 8},
        {"pp": 4, "vpp": 2, "num_microbatches": 6},
        ("6", "pp=4", "--gbs"),
    ),
    "engine-schedule": Case(
        {**PT, **ZERO_BUBBLE}, {**MG, **ZERO_BUBBLE}, ("--schedule zero-bubble", "megatron", "1f1b, interleaved")
    ),
    "equal-rounds": Case(
        {**TT, **ZERO_BUBBLE, "num_microbatches": 3},
        {**TT, **ZERO_BUBBLE, "num_microbatches": 5},
        ("5", "2 rounds", "pp=2", "--schedule zero-bubble", "--gbs"),
    ),
    "zero-bubble-recompute": Case(
        {**PT, **ZERO_BUBBLE},
        {**PT, **ZERO_BUBBLE, "recompute": "full"},
        ("--recompute full", "zero-bubble", "--recompute none"),
    ),
    "cp-seq": Case(
        {**DS, "cp": 2, "workload": Workload(seq=4098)},
        {"cp": 2, "workload": Workload(seq=4098)},
        ("--seq 4098", "remainder 2", "4096 or 4100", "--cp"),
    ),
    "tt-seq": Case(
        {**MG, "workload": Workload(seq=4097)},
        {**TT, "workload": Workload(seq=4097)},
        ("--seq 4097", "1 x 2 x 1"),
    ),
    "sp-needs-tp": Case({"sp": 1, "tp": 2}, {"sp": 1, "tp": 1}, ("--sp", "tp=1", "raise --tp")),
    "sp-seq": Case(
        {"sp": 1, "tp": 2}, {"sp": 1, "tp": 8, "cp": 2, "workload": Workload(seq=4100)}, ("4100 / 2", "tp=8")
    ),
    "moe-tp-needs-sp": Case({**MG, "tp": 2, "sp": 1}, {**MG, "tp": 2}, ("tp=2", "add --sp"), routed()),
    "expert-world": Case(
        {**MG, "ep": 4, "dp_shard": 4},
        {**MG, "ep": 4, "dp_shard": 2},
        ("1 x 1 x 2", "1 x 4", "--ep"),
        routed(),
    ),
    "expert-replicas": Case(
        {**MG, "ep": 2, "dp_shard": 2, "dp_replicate": 2, "zero_stage": 1},
        {**MG, "ep": 4, "dp_shard": 6, "dp_replicate": 4, "zero_stage": 1},
        ("dp_replicate=4", "6 ranks", "--ep"),
        routed(),
    ),
    "dp-replicate-needs-zero": Case(
        {"dp_replicate": 2, "zero_stage": 1},
        {"dp_replicate": 2},
        ("dp_replicate=2", "--zero 0", "raise --zero"),
    ),
    "ds-zero-ge2-with-pp": Case(
        {**DS, "pp": 2, "zero_stage": 1},
        {**DS, "pp": 2, "zero_stage": 2},
        ("--zero 2", "pp=2", "--zero 1, or pp 1"),
    ),
    "ds-moe-zero3": Case(
        {**DS, "ep": 2, "zero_stage": 2},
        {**DS, "ep": 2, "zero_stage": 3},
        ("--zero 3", "ep=2", "--zero 2"),
        routed(),
    ),
    "ulysses-heads": Case({**DS, "cp": 8}, {**DS, "cp": 16}, ("cp=16", "8 / tp=1", "4 / tp=1 KV heads", "lower --cp")),
    "pp-bubble": Case(
        {"pp": 4, "num_microbatches": 4, "workload": Workload(gbs=4)},
        {"pp": 4, "num_microbatches": 3, "workload": Workload(gbs=3)},
        ("3", "pp=4", "raise --gbs"),
    ),
    "zero-with-dp1": Case({"zero_stage": 1, "cp": 2}, {"zero_stage": 1}, ("--zero 1", "--zero 0")),
    "tp-inside-scale-up": Case(
        {"tp": 8, "cluster": "dgx-h100"}, {"tp": 16, "cluster": "dgx-h100"}, ("tp=16", "8", "lower --tp")
    ),
    "cp-short-pieces": Case(
        {"cp": 2, "workload": Workload(seq=8192)},
        {"cp": 4, "workload": Workload(seq=8192)},
        ("cp=4", "8192", "4096"),
    ),
    "whole-nodes": Case(
        {"dp_shard": 16, "cluster": "dgx-h100"}, {"dp_shard": 12, "cluster": "dgx-h100"}, ("--gpus 12", "multiple of 8")
    ),
    "ds-grad-dtype-needs-zero": Case(
        {**DS, "grad_dtype": "fp32", "zero_stage": 1},
        {**DS, "grad_dtype": "fp32"},
        ("--grad-dtype fp32", "--zero 1"),
    ),
    "mg-muon": Case(
        {**MG, "optimizer": "muon"},
        {**MG, "optimizer": "muon", "zero_stage": 1},
        ("muon", "--zero 1", "--zero 0"),
    ),
    "mg-offload": Case(
        {**MG, **HOST, "zero_stage": 1},
        {**MG, **HOST, "zero_stage": 1, "optimizer": "adamw-bf16"},
        ("adamw-bf16", "--zero 1", "adamw"),
    ),
    "tt-tied-pp": Case({**MG, "pp": 2}, {**TT, "pp": 2}, ("pp=2", "dense", "set pp to 1"), dense(tied=True)),
    "tt-cp-shards": Case({**TT, "cp": 2, "zero_stage": 3}, {**TT, "cp": 2}, ("cp=2", "--zero 0", "--zero 3")),
    "fsdp2-even-rows": Case(
        {**PT, "dp_shard": 32, "zero_stage": 3},
        {**PT, "dp_shard": 40, "zero_stage": 3},
        ("40 ranks", "--ep"),
        routed(),
    ),
    "fp8-dims": Case(
        {**MG, "precision": "fp8-delayed"},
        {**MG, "precision": "fp8-delayed", "tp": 8},
        ("fp8-delayed", "multiples of 16", "q_proj", "8 x 64", "tp=8", "lower --tp"),
    ),
    "mg-precision-aware": Case(
        {**MG, "optimizer": "adamw-bf16", "zero_stage": 1},
        {**MG, "optimizer": "adamw-bf16"},
        ("adamw-bf16", "--zero 1"),
    ),
    "bf16-optimizer-is-zero1": Case({**DS, "pp": 2, "precision": "fp16"}, {**DS, "pp": 2}, ("--zero 0", "pp=2")),
    "ds-z3-leaf": Case({**DS, "zero_stage": 2}, {**DS, "zero_stage": 3}, ("--zero 3", "set_z3_leaf_modules"), routed()),
    "z3-does-not-shard-4bit": Case(
        {**PT, "workload": QLORA, "zero_stage": 3},
        {**DS, "workload": QLORA, "zero_stage": 3},
        ("--qlora", "--zero 3", "--engine pytorch"),
    ),
    "fp8-does-not-save-weights": Case(MG, {**MG, "precision": "mxfp8"}, ("mxfp8", "16-bit")),
    "fp8-dims-skipped": Case(
        {**PT, "precision": "fp8-rowwise"},
        {**PT, "precision": "fp8-rowwise", "tp": 8},
        ("fp8-rowwise", "tp=8", "16", "lower --tp"),
    ),
}
CASES.update({rule: Case(*case) for of in (runtime_rules, checked_rules) for rule, case in of.CASES.items()})


def situation(model: Model, given: dict[str, Any]) -> tuple[Setting, Plans]:
    """A setting and one plan from keywords of Scenario and Plans, a workload, a card, a cluster."""
    columns = {name: value for name, value in given.items() if name in COLUMNS}
    scenario = {name: value for name, value in given.items() if name in Scenario.__struct_fields__}
    setting = make_setting(
        model,
        given.get("workload", Workload()),
        Scenario(**scenario),
        accelerator=find_accelerator(given["card"]) if "card" in given else None,
        cluster=find_cluster(given["cluster"]) if "cluster" in given else None,
    )
    return setting, make_plans({"etp": 1, **columns})


def test_every_rule_has_a_case_and_the_list_is_frozen() -> None:
    assert len(BY_ID) == len(RULES)
    assert set(CASES) == set(BY_ID)
    golden = (Path(__file__).parent / "golden" / "rule_ids.txt").read_text(encoding="utf-8").split("\n")
    assert sorted(f"{rule.id} {rule.severity}" for rule in RULES) == [line for line in golden if line]


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_passes_what_is_legal_and_names_what_is_not(rule: str) -> None:
    case = CASES[rule]
    setting, plans = situation(case.sound or case.model, case.good)
    assert not violations([BY_ID[rule]], setting, plans)
    setting, plans = situation(case.model, case.bad)
    (found,) = findings([BY_ID[rule]], setting, plans)
    assert found.rule == rule
    for word in case.words:
        assert word in found.message
    assert "{" not in found.message
    assert len(found.message) < 260
    assert found.source


@pytest.mark.parametrize("rule", [rule for rule in CASES if BY_ID[rule].severity == "refuse"])
def test_a_refusal_stops_the_plan_with_its_id(rule: str) -> None:
    setting, plans = situation(CASES[rule].model, CASES[rule].bad)
    with pytest.raises(Refused) as caught:
        require([BY_ID[rule]], setting, plans)
    assert caught.value.rule == rule
    assert str(caught.value).startswith(f"[{rule}] ")


def test_many_plans_are_judged_row_by_row() -> None:
    setting = setting_of(dense(), engine="megatron")
    rows = {"tp": [1, 3, 8, 8], "pp": [1, 1, 3, 4], "zero_stage": [0, 1, 1, 1]}
    together = violations(RULES, setting, make_plans(rows))
    for row in range(4):
        apart = violations(RULES, setting, make_plans({name: values[row] for name, values in rows.items()}))
        assert set(apart) == {rule for rule, mask in together.items() if mask[row]}


def test_what_real_runs_use_is_not_refused() -> None:
    """Llama 3 405B on 16,384 GPUs; Megatron's 70B; DeepSeek-V3's expert parallelism; FSDP2 on 8 ranks."""
    for model, scenario, columns in (
        (llama("70b"), {"engine": "megatron", "schedule": "interleaved"},
         {"tp": 8, "sp": 1, "pp": 4, "vpp": 5, "dp_shard": 2, "zero_stage": 1, "num_microbatches": 32}),
        (latent(), {"engine": "megatron"}, {"ep": 8, "dp_shard": 8, "etp": 1, "zero_stage": 1}),
        (llama("8b"), {"engine": "torchtitan"}, {"tp": 8, "sp": 1, "cp": 2, "pp": 2, "dp_shard": 4, "zero_stage": 3}),
        (llama("8b"), {"engine": "deepspeed"}, {"dp_shard": 64, "zero_stage": 3}),
        (llama("8b"), {"engine": "megatron", "precision": "mxfp8"}, {"tp": 2, "sp": 1, "dp_shard": 4, "zero_stage": 1}),
        (llama("8b"), {"engine": "megatron"}, {"pp": 2, "vpp": 2, "zero_stage": 3, "num_microbatches": 2}),
    ):  # fmt: skip
        schedule = {"schedule": "interleaved"} if columns.get("vpp") else {}
        setting = setting_of(model, **{**scenario, **schedule})
        require(REFUSALS, setting, make_plans({"etp": columns.get("tp", 1), **columns}))


def test_the_planner_rejects_refusals_and_warnings_alone() -> None:
    assert {rule.severity for rule in PLANNER} == {"refuse", "warn"}
    assert [rule for rule in RULES if rule.severity == "refuse"] == [*REFUSALS, *RUNTIME]
    assert {rule.id for rule in RULES if rule.offered} == {"fp32-base-for-lora", "ds-bucket-larger-than-saving"}
    assert not {rule.severity for rule in RULES if rule.offered} - {"warn"}
    assert not set(PLANNER) & set(RUNTIME)
    assert isinstance(
        violations(PLANNER, setting_of(dense()), make_plans({"tp": 3}))["heads-divisible-by-tp"], np.ndarray
    )
