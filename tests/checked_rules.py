"""The cases of the rules that `check` alone says: (what passes, what does not, words, model, model of what passes).

With them those of the rules about memory.
"""

from __future__ import annotations

from typing import Any

import memory_rules
from strategies import dense, latent, llama, routed
from trainledger.facts.model_load import load_model
from trainledger.facts.workload import Workload

MG, DS, TT, PT = ({"engine": name} for name in ("megatron", "deepspeed", "torchtitan", "pytorch"))
BIG, SMALL = load_model("llama-3-8b"), load_model("qwen2.5-1.5b")
MANY = load_model("qwen3-30b-a3b")
SEVENTY = load_model("bloom-176b")

CASES: dict[str, tuple[Any, ...]] = {
    "fp8-small-gemm": (
        {**MG, "precision": "mxfp8"},
        {**MG, "precision": "mxfp8"},
        ("qwen2.5-1.5b", "2048", "use bf16"),
        SMALL,
        BIG,
    ),
    "engine-dropout": ({**MG, "dropout": "on"}, {**TT, "dropout": "on"}, ("--dropout on", "torchtitan", "megatron")),
    "engine-overlap": (
        {**DS, "overlap_comm": "on"},
        {**MG, "overlap_comm": "on"},
        ("--overlap-comm on", "megatron", "deepspeed"),
    ),
    "fp8-needs-compile": (
        {**TT, "precision": "fp8-rowwise", "compile": "on"},
        {**TT, "precision": "fp8-rowwise"},
        ("fp8-rowwise", "--compile on"),
        BIG,
    ),
    "fp16-of-bf16-model": (
        {**PT, "precision": "bf16"},
        {**PT, "precision": "fp16"},
        ("llama-3-8b", "65504", "--precision bf16"),
        BIG,
    ),
    "tt-chunked-loss": (
        {**TT, "loss": "chunked", "loss_chunks": 8},
        {**TT, "loss": "chunked", "loss_chunks": 7},
        ("--seq 4096", "7 chunks", "--loss-chunks"),
    ),
    "gemm-alignment": ({"tp": 1}, {"tp": 2}, ("is 32 x 64", "tp=2", "64"), dense(), llama("8b")),
    "flash2-on-turing": (
        {**PT, "precision": "fp16", "card": "A100-SXM4-80GB"},
        {**PT, "precision": "fp16", "card": "V100-SXM2-32GB"},
        ("8.0", "V100", "7.0", "--attention eager"),
    ),
    "pcie-no-nvlink": (
        {"dp_shard": 8, "cluster": "dgx-h100"},
        {"dp_shard": 8, "cluster": "pcie-8x-l40s"},
        ("8 GPUs", "PCIe", "tp at 1"),
    ),
    "embedding-counts-as-layer": (
        {**MG, "pp": 10},
        {**MG, "pp": 12},
        ("70 layers", "pp=12", "--pp-layout"),
        SEVENTY,
    ),
    "mtp-embedding-copy": (
        {**MG, "pp": 2},
        {**MG, "pp": 2, "workload": Workload(mtp=True)},
        ("--mtp", "pp=2", "--pp-layout"),
        latent(),
    ),
    "dpo-doubles-batch": ({}, {"workload": Workload(frozen_copy=1), "mbs": 4}, ("mbs=4", "--mbs doubled")),
    "moe-topk-activation": ({}, {}, ("2 experts", "8192 rows", "--mbs"), routed(), dense()),
    "z3-moe-small-modules": (
        {**DS, "zero_stage": 2},
        {**DS, "zero_stage": 3},
        ("--zero 3", "18,432 matrices", "--ep"),
        MANY,
    ),
}
CASES.update(memory_rules.CASES)
