"""The cases of the rules of `prove`: (what passes, what does not, words, model, model of what passes)."""

from __future__ import annotations

from typing import Any

from strategies import dense, latent, routed
from trainledger.facts.model_load import load_model
from trainledger.facts.workload import Workload

LORA = Workload(lora_rank=8, lora_targets=("all-linear",))
PT: dict[str, Any] = {"engine": "pytorch"}
RUN: dict[str, Any] = {**PT, "precision": "fp32"}
FP8: dict[str, Any] = {**PT, "precision": "fp8-tensorwise"}
MAMBA = load_model("nemotron-h-56b")
TIED_BIAS = load_model("gpt2", overrides={"model_type": "gptj", "tie_word_embeddings": "true"})

CASES: dict[str, tuple[Any, ...]] = {
    "runtime-engine": (RUN, {"engine": "megatron"}, ("--engine megatron", "--engine pytorch")),
    "runtime-ssm": (RUN, RUN, ("nemotron-h-56b", "state-space"), MAMBA, dense()),
    "runtime-precision": (RUN, {**PT, "precision": "fp16-pure"}, ("--precision fp16-pure", "fp32, bf16, fp16")),
    "runtime-optimizer": (RUN, {**RUN, "optimizer": "muon"}, ("--optimizer muon", "adamw, adamw-fused, adamw-8bit")),
    "runtime-recompute": (RUN, {**RUN, "recompute": "some"}, ("--recompute some", "none, full")),
    "runtime-attention": (RUN, {**RUN, "attention": "eager"}, ("--attention eager", "leave it out")),
    "runtime-adapters": (RUN, {**RUN, "workload": LORA}, ("--lora-rank 8", "leave it out")),
    "runtime-copies": (RUN, {**RUN, "workload": Workload(ema=True)}, ("--ema", "--frozen-copy", "leave them out")),
    "runtime-mtp": (RUN, {**RUN, "workload": Workload(mtp=True)}, ("--mtp", "leave the flag out"), latent()),
    "runtime-offload": (
        RUN,
        {**RUN, "zero_stage": 3, "offload": ("parameters",)},
        ("--offload parameters", "leave it out"),
    ),
    "runtime-interleaved": (
        {**RUN, "pp": 2, "vpp": 2, "schedule": "interleaved"},
        {**RUN, "pp": 2, "schedule": "interleaved"},
        ("vpp=1", "--vpp 2"),
    ),
    "runtime-microbatches": (
        {**RUN, "pp": 4, "num_microbatches": 4},
        {**RUN, "pp": 4, "num_microbatches": 3},
        ("3 micro-batches", "pp=4", "--gbs"),
    ),
    "runtime-idle-stage": (
        {**RUN, "pp": 3, "pp_layout": (0, 2, 0), "num_microbatches": 3},
        {**RUN, "pp": 3, "pp_layout": (1, 0, 1), "num_microbatches": 3},
        ("--pp-layout 1,0,1", "pipeline rank 1 of pp=3", "give it a layer"),
        dense(layers=2),
    ),
    "runtime-experts-tp": (
        {**RUN, "ep": 2, "dp_shard": 2},
        {**RUN, "ep": 2, "dp_shard": 2, "tp": 2},
        ("ep=2", "tp=2"),
        routed(),
    ),
    "runtime-etp": ({**RUN, "tp": 2, "etp": 2}, {**RUN, "tp": 2, "etp": 1}, ("etp=1", "tp=2", "--etp 2"), routed()),
    "runtime-even-tp": (RUN, {**RUN, "tp": 2, "etp": 2}, ("tp=2", "211", "embed_tokens", "--set vocab_size=212")),
    "runtime-contiguous-tp": (
        {**RUN, "tp": 2, "etp": 2},
        {**RUN, "tp": 2, "etp": 2},
        ("tp=2", "gpt2", "q, k and v one after the other", "set tp to 1"),
        load_model("gpt2", overrides={"vocab_size": "50304"}),
        load_model("llama-3-8b"),
    ),
    "runtime-expert-rows": (
        {**RUN, "tp": 8, "etp": 8},
        {**PT, "tp": 8, "etp": 8},
        ("width 12", "multiples of 8", "bf16"),
        routed(),
    ),
    "tied-head-bias": (RUN, {**RUN, "pp": 2}, ("pp=2", "set pp to 1"), TIED_BIAS),
    "runtime-positions": (
        {**RUN, "workload": Workload(seq=1024)},
        {**RUN, "workload": Workload(seq=1025)},
        ("--seq 1025", "1024 positions"),
        load_model("gpt2"),
    ),
    "cp-flash": (
        {**RUN, "cp": 2, "card": "h100", "precision": "bf16"},
        {**RUN, "cp": 2, "card": "h100"},
        ("cp=2 on H100-SXM5-80GB", "no fp32", "--precision bf16"),
    ),
    "cp-causal": (
        {**RUN, "cp": 2, "workload": Workload(seq=4096)},
        {**RUN, "cp": 2, "workload": Workload(seq=8192)},
        ("cp=2", "a window of 4096", "--seq 8192"),
        load_model("mistral-7b-v0.1"),
    ),
    "runtime-fp8-layers": ({**PT, "precision": "bf16"}, FP8, ("gpt2", "[in, out]", "bf16"), load_model("gpt2")),
    "runtime-fp8-dims": (
        {**FP8, "tp": 2},
        {**FP8, "tp": 4},
        ("k_proj", "8 x 64", "tp=4", "multiples of 16", "lower --tp"),
        dense(vocab=212),
    ),
    "runtime-fp8-rows": (
        {**FP8, "dp_shard": 3},
        {**FP8, "dp_shard": 3, "zero_stage": 3},
        ("3 ranks", "64 rows", "q_proj", "fp8-rowwise"),
        dense(),
    ),
    "runtime-fp8-unit": (
        {**FP8, "dp_shard": 2, "zero_stage": 3},
        {**FP8, "dp_shard": 2, "zero_stage": 3},
        ("fp8-tensorwise", "--zero 3", "nothing but matrices", "fp8-rowwise"),
        load_model("llama-3-8b", overrides={"model_type": "olmo"}),
        dense(),
    ),
    "runtime-fp8-zero-bubble": (
        {**FP8, "pp": 2, "num_microbatches": 2},
        {**FP8, "pp": 2, "num_microbatches": 2, "schedule": "zero-bubble"},
        ("fp8-tensorwise", "zero-bubble", "--schedule 1f1b"),
        dense(),
    ),
    "dry-ddp": ({**RUN, "dp_shard": 2, "zero_stage": 1}, {**RUN, "dp_shard": 2}, ("--dry", "dp=2", "raise --zero")),
    "dry-experts": (PT, RUN, ("--dry", "fp32", "--precision bf16"), routed()),
    "dry-ranks": ({**RUN, "dp_shard": 1024}, {**RUN, "dp_shard": 1025}, ("--dry", "--gpus 1025", "at most 1024")),
    "runtime-ranks": ({**RUN, "dp_shard": 64}, {**RUN, "dp_shard": 65}, ("--gpus 65", "64", "--cluster-args")),
}
