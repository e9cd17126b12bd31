"""For every rule of the ledger a plan that it speaks of and one that it does not."""

from __future__ import annotations

from typing import Any, NamedTuple

PT, DS, MG, TT = ({"engine": name} for name in ("pytorch", "deepspeed", "megatron", "torchtitan"))
SMALL = {"model": "qwen2.5-1.5b", "seq": 1024}
LARGE = {"model": "llama-3-8b", "seq": 1024}
FULL = {"model": "llama-2-70b", "seq": 1024}
H100 = {"gpu": "h100", "gpus": 8}
MIXTRAL = {"model": "mixtral-8x7b", "set": ["num_hidden_layers=2"], "seq": 1024}
GEMM = {"model": "custom", "hidden": 1024, "layers": 2, "heads": 8, "ffn": 4096, "vocab": 32000, "seq": 1024}


class Pair(NamedTuple):
    """A plan that a rule speaks of, one that it does not, and words of what it says."""

    bad: dict[str, Any]
    good: dict[str, Any]
    words: tuple[str, ...]
    severity: str = "advise"


PAIRS: dict[str, Pair] = {
    "states-do-not-fit": Pair(
        {**LARGE, **DS, **H100, "zero": 0}, {**LARGE, **DS, **H100, "zero": 3}, ("loading", "--zero 1"), "refuse"
    ),
    "does-not-fit": Pair(
        {**SMALL, **PT, "gpu": "v100-32gb", "precision": "fp16", "mbs": 64},
        {**SMALL, **PT, "gpu": "h100"},
        ("are needed in the", "larger cards"),
        "refuse",
    ),
    "margin<10%": Pair(
        {**SMALL, **PT, "gpu": "h100", "reserve": "48 GB"},
        {**SMALL, **PT, "gpu": "h100"},
        ("are left", "less than 10%", "--mbs"),
        "warn",
    ),
    "host-ram-unknown": Pair(
        {**SMALL, **DS, **H100, "zero": 1, "offload": ["optimizer"]},
        {**SMALL, **DS, "cluster": "dgx-h100", "gpus": 8, "zero": 1, "offload": ["optimizer"]},
        ("host memory per GPU", "--cluster"),
        "warn",
    ),
    "host-memory": Pair(
        {**FULL, **DS, "cluster": "dgx-1-v100", "precision": "fp16", "gpus": 8, "zero": 2, "offload": ["optimizer"]},
        {**SMALL, **DS, "cluster": "dgx-h100", "gpus": 8, "zero": 1, "offload": ["optimizer"]},
        ("share of its node", "more nodes"),
        "warn",
    ),
    "fragmentation": Pair(
        {**SMALL, **PT, **H100, "zero": 1},
        {**SMALL, **PT, **H100, "zero": 1, "allocator": "expandable"},
        ("reserves", "expandable_segments"),
    ),
    "nccl-memory": Pair(
        {**LARGE, **MG, "gpu": "v100-32gb", "precision": "fp16", "gpus": 32, "tp": 4, "pp": 2, "zero": 1},
        {**LARGE, **MG, **H100, "zero": 1},
        ("communicators take", "axis"),
    ),
    "foreach-transient": Pair(
        {**SMALL, **PT, "gpu": "h100", "zero": 0},
        {**SMALL, **PT, "gpu": "h100", "zero": 0, "optimizer": "adamw-fused"},
        ("foreach", "--optimizer adamw-fused"),
    ),
    "read-after-step-2": Pair(
        {**SMALL, **PT, **H100, "zero": 3}, {**SMALL, **DS, "zero": 0, "precision": "fp16"}, ("second step",)
    ),
    "zero3-when-tight": Pair(
        {**SMALL, **PT, **H100, "zero": 3},
        {**LARGE, **PT, "gpu": "a100-40gb", "gpus": 8, "zero": 3},
        ("not tight", "GB a step", "--zero 2"),
    ),
    "z3-over-slow-link": Pair(
        {**SMALL, **PT, "cluster": "aws-p3.16xlarge", "precision": "fp16", "gpus": 16, "zero": 3, "seq": 128},
        {**SMALL, **PT, "cluster": "aws-p3.16xlarge", "precision": "fp16", "gpus": 8, "zero": 3, "seq": 128},
        ("on several nodes", "times what the arithmetic", "--dp-replicate"),
        "warn",
    ),
    "no-sync-memory": Pair(
        {**SMALL, **PT, **H100, "zero": 3, "gbs": 32},
        {**SMALL, **PT, **H100, "zero": 3, "gbs": 8},
        ("each of 4 micro-batches", "no_sync"),
    ),
    "ds-bucket-size": Pair(
        {**SMALL, **DS, "gpu": "v100-16gb", "precision": "fp16", "gpus": 8, "zero": 2},
        {**SMALL, **DS, "gpu": "v100-16gb", "precision": "fp16", "gpus": 8, "zero": 2, "reduce-bucket": 1000000},
        ("the bucket takes", "--reduce-bucket 2359296"),
    ),
    "ds-z3-live-params": Pair(
        {**SMALL, **DS, "gpu": "v100-16gb", "precision": "fp16", "gpus": 8, "zero": 3},
        {**SMALL, **DS, **H100, "zero": 3},
        ("1,000,000,000 parameters", "stage3_max_live_parameters"),
    ),
    "load-before-shard": Pair(
        {**FULL, **PT, "gpu": "h100", "gpus": 64, "zero": 3},
        {**SMALL, **PT, **H100, "zero": 3},
        ("loading by way of", "meta device"),
    ),
    "init-peak": Pair(
        {**FULL, **PT, "gpu": "h100", "lora-rank": 8, "qlora": True},
        {**SMALL, **PT, "gpu": "h100", "lora-rank": 8, "qlora": True},
        ("before it is quantised", "layer by layer"),
        "warn",
    ),
    "model-not-built-under-zero-init": Pair(
        {**FULL, **DS, "gpu": "h100", "gpus": 64, "zero": 3},
        {**SMALL, **DS, **H100, "zero": 3},
        ("zero.Init", "on each card"),
    ),
    "save-peak": Pair(
        {**FULL, **PT, "gpu": "h100", "gpus": 64, "zero": 3},
        {**SMALL, **PT, **H100, "zero": 3},
        ("saving by way of", "SHARDED_STATE_DICT"),
    ),
    "distopt-bucket-padding": Pair(
        {**GEMM, **MG, "gpu": "h100", "layers": 1, "hidden": 64, "heads": 1, "ffn": 64, "vocab": 128, "gpus": 2048,
         "zero": 1},
        {**LARGE, **MG, **H100, "zero": 1},
        ("2048 ranks", "padding"),
    ),
    "logits-dominate": Pair(
        {**SMALL, **TT, **H100, "zero": 3, "mbs": 8},
        {**LARGE, **TT, **H100, "zero": 3},
        ("as wide as the vocabulary", "--loss chunked"),
    ),
    "version-dependent-logits": Pair(
        {**SMALL, **TT, **H100, "zero": 3, "mbs": 8},
        {**GEMM, **TT, **H100, "zero": 3, "seq": 64},
        ("logits in fp32", "torchtitan", "--framework-version"),
    ),
    "eager-attention": Pair(
        {**SMALL, **MG, **H100, "zero": 1, "attention": "eager"},
        {**SMALL, **MG, **H100, "zero": 1},
        ("scores", "--attention flash"),
    ),
    "activations-not-sharded": Pair(
        {**SMALL, **PT, "gpu": "h100", "gpus": 64, "zero": 3, "seq": 16384},
        {**SMALL, **PT, **H100, "zero": 3},
        ("of one sequence", "--cp"),
    ),
    "full-recompute-cost": Pair(
        {**SMALL, **PT, **H100, "zero": 3},
        {**SMALL, **PT, **H100, "zero": 3, "recompute": "none"},
        ("--recompute none would hold", "compute"),
    ),
    "core-attn-recompute-with-flash": Pair(
        {**SMALL, **MG, **H100, "zero": 1, "recompute": "selective"},
        {**SMALL, **MG, **H100, "zero": 1, "recompute": "selective", "recompute-parts": ["mlp"]},
        ("core_attn", "--recompute none"),
    ),
    "pp-edge-stages": Pair(
        {**SMALL, **MG, "gpu": "h100", "gpus": 4, "pp": 4, "gbs": 8, "zero": 0},
        {**GEMM, **MG, "gpu": "h100", "gpus": 1, "zero": 0},
        ("pp_stage", "--pp-layout"),
    ),
    "ep-imbalance": Pair(
        {**MIXTRAL, **MG, **H100, "zero": 1, "ep": 8, "seq": 8192},
        {**MIXTRAL, **MG, **H100, "zero": 1, "ep": 8, "seq": 8192, "routing": "worst"},
        ("visited alike", "--routing worst"),
    ),
    "fp8-memory-up": Pair(
        {**LARGE, **MG, **H100, "zero": 1, "precision": "fp8-delayed"},
        {**LARGE, **MG, **H100, "zero": 1},
        ("not what saves memory", "speed"),
    ),
    "fp16-without-scaling": Pair(
        {**SMALL, **PT, "precision": "fp16", "loss-scaling": "off"},
        {**SMALL, **PT, "precision": "fp16", "loss-scaling": "on"},
        ("6e-8", "--loss-scaling on"),
        "warn",
    ),
    "initial-scale": Pair(
        {**SMALL, **PT, "precision": "fp16", "initial-scale": 2.0**32},
        {**SMALL, **PT, "precision": "fp16", "initial-scale": 65536.0},
        ("about 17 steps", "--initial-scale 65536"),
        "warn",
    ),
    "bf16-underflow": Pair(
        {**SMALL, **PT, "precision": "bf16-pure", "learning-rate": 3e-4},
        {**SMALL, **PT, "precision": "bf16", "learning-rate": 3e-4},
        ("0.0003", "beyond 0.15", "fp32"),
        "warn",
    ),
    "budget-unsaid": Pair(
        {**SMALL, **PT, "gpu": "h100", "gbs": 8},
        {**SMALL, **PT, "gpu": "h100", "gbs": 8, "token-budget": 1e9, "usd-per-gpu-hour": 2.0},
        ("how many tokens", "--usd-per-gpu-hour"),
    ),
}  # fmt: skip
