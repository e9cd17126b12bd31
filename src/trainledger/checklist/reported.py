"""What users have reported, by the names under which reports were sorted: the rule that says it, or what it waits for.

An id that is a rule's own needs no entry.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Needs = Literal["the time of a step", "an engine's own config", "a log or a table", "checkpoints", "its kind of model"]


class Waits(msgspec.Struct, frozen=True):
    """What a rule cannot be asked without, and why."""

    needs: Needs
    why: str


ALIASES: dict[str, str] = {
    "SHARDED_STATE_DICT via DCP": "save-peak",
    "sharded state dict": "save-peak",
    "sharded": "save-peak",
    "chunked CE": "logits-dominate",
    "fused cross entropy": "logits-dominate",
    "context parallel": "activations-not-sharded",
    "cpu placement": "does-not-fit",
    "fsdp_offload_params": "does-not-fit",
    "stage 3 + offload_param": "does-not-fit",
    "full recompute": "does-not-fit",
    "recompute": "does-not-fit",
    "cpu_ram_efficient_loading": "load-before-shard",
    "ep": "z3-moe-gathers-all",
    "expandable_segments": "fragmentation",
    "reserved-vs-allocated": "fragmentation",
    "flash attention": "eager-attention",
    "fp8-param-gather": "fp8-does-not-save-weights",
    "fsdp-qlora": "z3-does-not-shard-4bit",
    "hybrid shard": "z3-over-slow-link",
    "zero_hpz_partition_size=8": "z3-over-slow-link",
    "no_sync when it fits": "no-sync-memory",
    "z3-leaf-modules": "ds-z3-leaf",
    "z3-moe-leaf": "ds-z3-leaf",
    "zero1": "states-do-not-fit",
    "zero<=1": "ds-bucket-larger-than-saving",
    "zero<=2": "zero3-when-tight",
    "zero3-init": "model-not-built-under-zero-init",
    "bf16-on-turing": "bf16-on-volta",
    "fp32-params": "fp32-base-for-lora",
    "fp8-dims (skip)": "fp8-dims-skipped",
    "mg-expert-world": "expert-world",
    "mg-ep-experts": "experts-divisible-by-ep",
    "tt-ep": "experts-divisible-by-ep",
    "tt-batch": "gbs-divisible",
    "tt-pp": "vpp-needs-interleaved",
}
"""Other spellings, and what is recommended: the rule whose finding, or whose knob, says it."""

USAGE: dict[str, str] = {
    "mg-world": "dp is what --gpus leaves over tp x pp x cp: what does not divide is refused as world-divisible",
    "tt-world": "as mg-world, with --dp-replicate and --dp-shard",
    "mg-fp4-fp8": "--precision is one recipe",
    "mg-recompute-selective": "--recompute is one word, and has no method",
    "mg-distribute-saved": "no plan divides saved activations in that way: --sp does",
    "ds-estimator": "it is an engine of its own: --engine deepspeed-estimator",
}
"""What a plan cannot say wrong: there is one flag for it."""

_CONFIG, _LOG = "an engine's own config", "a log or a table"
WAITS: dict[str, Waits] = {
    "ds-resume-other-dp": Waits("checkpoints", "a plan does not name the checkpoint that it resumes from"),
    "ds-elastic-load": Waits("checkpoints", "as ds-resume-other-dp"),
    "8bit-under-fsdp-version": Waits(_CONFIG, "the release of accelerate is beside that of the engine"),
    "ds-min-loss-scale": Waits(_CONFIG, "min_loss_scale is no key of a plan"),
    "distopt-overlap": Waits(_CONFIG, "overlap flags are no keys of a plan"),
    "mg-torch-fsdp2": Waits(_CONFIG, "--use-torch-fsdp2 is another engine inside Megatron, without a profile"),
    "nccl-p2p-disabled": Waits(_CONFIG, "the environment of a run is no part of a plan"),
    "use-cache-in-training": Waits(
        _CONFIG, "use_cache is a key of the trainer, which turns it off under recomputation"
    ),
    "variable-length-peak": Waits(_CONFIG, "the longest sample is a fact of the data; a plan has one --seq"),
    "micro-rollout-batch": Waits(_CONFIG, "a plan is of training alone, without a rollout"),
    "rollout-fraction": Waits(_CONFIG, "a plan is of training alone, without a rollout"),
    "apples-to-oranges": Waits(_LOG, "two measurements of unlike runs"),
    "gpu-count-inconsistent": Waits(_LOG, "rows of one table that contradict each other"),
    "wrong-gpu-count": Waits(_LOG, "what an estimator printed for another number of GPUs"),
    "recompute-not-active": Waits(_LOG, "a measured peak beside the plan's"),
    "states-exceed-measurement-at-16B": Waits(_LOG, "a measured peak beside the plan's"),
    "t5-fp16": Waits("its kind of model", "models with an encoder are read as a count of parameters"),
    "mg-expert-groups": Waits("its kind of model", "groups of a router are not read from configs"),
}
"""What no plan, ledger or run of this package can judge yet."""

SETTINGS: dict[str, str] = {
    "ds-allgather-bucket-small": "DeepSpeed's JSON: allgather_bucket_size cuts the gathering after a step into many",
    "ds-fp16-bf16-both": "DeepSpeed's JSON: fp16.enabled and bf16.enabled",
    "ds-gradient-allreduce-sum": 'DeepSpeed\'s JSON: gradient_allreduce_op "sum" at stage 3',
    "ds-trainer-mismatch": "a trainer's arguments beside DeepSpeed's JSON that says something else",
    "ds-unknown-key": "DeepSpeed's JSON: a key that its tables forbid, such as one that is misspelt",
    "fsdp-wrap": "accelerate's YAML: fsdp_auto_wrap_policy makes other units than blocks",
    "nvme-buffers": "DeepSpeed's JSON: offload to a disk, which is not counted",
    "zeropp-with-offload": "DeepSpeed's JSON: ZeRO++ beside offload",
}
"""What `check` says of a file of an engine's or launcher's own settings, beside the rules of the plan that it makes."""

MESSAGES: dict[str, str] = {
    "offload-not-active": "check MESSAGE: the card was asked for what the plan keeps in host memory",
}
"""What is said of an out-of-memory message."""
