"""Peaks that people published of pretraining and full fine-tuning, asked for as they would ask.

Nothing in this package was fitted to these runs, and each question was written before it was answered. The rows were
chosen afterwards, from those whose source states all that moves the peak: they keep what is met as it is, and predict
nothing about runs that are not here. What a row allows is how far it may be off.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from command_line import answer, run

GB = 1e9 / 2**30

MEGATRON = "https://github.com/NVIDIA/Megatron-LM/tree/d98e8a64dd/tests/functional_tests/test_cases/"
"""mem-max-allocated-bytes of golden_values_dev_dgx_*.json, which the last rank logs: that of the last stage.

All ran on eight H100 unless a row says otherwise. Of tests that name a vocabulary file, it is GPT-2's, and padded.
"""
QWEN3 = "https://github.com/pytorch/torchtitan/pull/1690"
DEEPSEEK = "https://github.com/pytorch/torchtitan/issues/1789"
LAMBDA = "https://github.com/LambdaLabsML/distributed-training-guide/blob/108b695/05-training-llama-405b/README.md"
"""PyTorch 2.5.1, and what the guide did then: FSDP of flat parameters with CPUOffload, in GB of 1e9."""

GPT_TINY: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 512,
    "n_layer": 12,
    "n_head": 8,
    "n_inner": 2048,
    "vocab_size": 50304,
    "n_positions": 1024,
    "tie_word_embeddings": True,
}
GPT_7B: dict[str, Any] = {
    "model_type": "starcoder2",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 16384,
    "vocab_size": 131584,
    "tie_word_embeddings": False,
    "use_bias": True,
}
LATENT: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
}
PROXY: dict[str, Any] = LATENT | {
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "intermediate_size": 4096,
    "moe_intermediate_size": 1024,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "vocab_size": 51712,
    "num_nextn_predict_layers": 1,
}
PROXY_TINY: dict[str, Any] = LATENT | {
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
    "moe_intermediate_size": 1024,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "vocab_size": 50304,
}
DEEPSEEK_16B: dict[str, Any] = LATENT | {
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "vocab_size": 102400,
}

MG = "--engine megatron --gpus 8 --gpu h100"
TINY = f"{MG} --seq 1024 --mbs 4 --gbs 32"
PIPES = f"{TINY} --pp 4 --attention eager --recompute none"
LONG = f"{MG} --seq 8192 --gbs 8 --zero 1 --recompute none"
EXPERTS = f"{MG} --seq 4096 --mbs 4 --gbs 32 --tp 2 --pp 2 --ep 4 --etp 1 --zero 1 --attention eager --mtp"
PROXIES = f"{EXPERTS} --recompute none --vpp 4 --schedule interleaved --loss native-fused"
TITAN = "--engine torchtitan --seq 4096"
TITAN_TP = f"{TITAN} --framework-version 2025-09-05 --tp 8 --recompute full --compile off --gpu h100-96gb"
TITAN_EP = f"{TITAN} --framework-version 2025-10-02 --gpus 8 --mbs 8 --recompute selective --gpu h100"
FLAT = "--engine fsdp1 --gpus 64 --gpu h100 --seq 4096 --mbs 1 --recompute full --precision bf16-pure"


class Peak(NamedTuple):
    """What was published: the model, the question, the meter and its figure in GiB, and the share it may be off by."""

    source: str
    model: str | dict[str, Any]
    question: str
    meter: str
    gib: float
    within: float


def golden(case: str, model: dict[str, Any], question: str, nbytes: int) -> Peak:
    return Peak(MEGATRON + case, model, question, "last stage", nbytes / 2**30, 0.05)


def tiny(case: str, question: str, nbytes: int, vocabulary: int = 50304) -> Peak:
    return golden(f"gpt/gpt3_mcore_te_{case}", GPT_TINY | {"vocab_size": vocabulary}, question, nbytes)


PEAKS = [
    golden("gpt/gpt3_7b_tp4_pp1_memory_speed", GPT_7B, f"{LONG} --mbs 2 --tp 4 --no-sp", 57143791616),
    golden(
        "gpt/gpt3_7b_tp1_pp4_memory_speed",
        GPT_7B | {"vocab_size": 131200},
        f"{LONG} --mbs 1 --pp 4 --vpp 8 --schedule interleaved",
        60720852992,
    ),
    golden("moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_memory_speed", PROXY, PROXIES, 60111630336),
    golden(
        "moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_mtp_resume_torch_dist_fp8",
        PROXY,
        f"{PROXIES} --precision fp8-tensorwise",
        57578217472,
    ),
    golden(
        "moe/deepseek_proxy_fsdp_ep2_fsdp2_ep_overlap",
        PROXY_TINY,
        f"{TINY} --ep 2 --etp 1 --zero 3 --recompute none --attention eager",
        2219356672,
    ),
    tiny(
        "tp1_pp1_dist_optimizer_no_mmap_bin_files",
        f"{TINY} --zero 1 --recompute none --attention eager",
        4702430720,
    ),
    tiny("tp1_pp1_resume_torch_dist_dist_optimizer", f"{TINY} --zero 1 --recompute none", 2691792384),
    tiny("tp1_pp1_resume_torch_dist_uniform_full_recompute", f"{TINY} --zero 0 --recompute full", 2561334272),
    tiny("tp1_pp4_vp1", f"{PIPES} --zero 0 --vpp 3 --schedule interleaved", 4161191424),
    tiny(
        "tp1_pp4_vp1_dist_optimizer_overlap_grad_reduce_param_gather_overlap_optimizer",
        f"{PIPES} --zero 1 --vpp 3 --schedule interleaved",
        3942493696,
    ),
    tiny(
        "tp2_pp2_resume_torch_dist_cross_entropy_loss_fusion",
        f"{TINY} --tp 2 --no-sp --pp 2 --zero 0 --recompute none --loss native-fused",
        1837607424,
        50432,
    ),
    # one GB200 node has four cards
    tiny(
        "tp2_pp2_resume_torch_dist_cross_entropy_loss_fusion_1node",
        f"{TINY} --gpus 4 --gpu gb200 --tp 2 --no-sp --pp 2 --zero 0 --recompute none --loss native-fused",
        1789536768,
        50432,
    ),
    tiny(
        "tp2_zp_z3_resume_fsdp_dtensor",
        f"{TINY} --tp 2 --no-sp --zero 3 --recompute none",
        1469652992,
        50432,
    ),
    Peak(
        QWEN3,
        "qwen3-32b",
        f"{TITAN} --framework-version 2025-09-11 --gpus 8 --mbs 2 --recompute full --compile on --gpu h100-96gb",
        "reserved",
        81.85,
        0.05,
    ),
    Peak(QWEN3, "qwen3-32b", f"{TITAN_TP} --gpus 32 --mbs 16", "reserved", 43.45, 0.10),
    Peak(QWEN3, "qwen3-32b", f"{TITAN_TP} --gpus 32 --mbs 32", "reserved", 70.79, 0.05),
    Peak(QWEN3, "qwen3-32b", f"{TITAN_TP} --gpus 64 --mbs 32", "reserved", 63.27, 0.05),
    Peak(
        DEEPSEEK,
        DEEPSEEK_16B,
        f"{TITAN_EP} --compile off --loss compiled",
        "reserved",
        0.96 * 79.1,
        0.10,
    ),
    Peak(LAMBDA, "llama-3.1-405b", f"{FLAT} --offload parameters", "allocated", 52.9 * GB, 0.05),
    Peak(LAMBDA, "llama-3.1-405b", f"{FLAT} --offload parameters", "reserved", 77.9 * GB, 0.10),
]

OUT_OF_MEMORY = [
    # on cards that report 95 GiB
    (QWEN3, "qwen3-32b", f"{TITAN_TP} --gpus 32 --mbs 64"),
    (DEEPSEEK, DEEPSEEK_16B, f"{TITAN_EP} --ep 8 --compile off --loss compiled"),
]


def asked(path: Path, model: str | dict[str, Any], question: str) -> list[str]:
    """The words of a question, a model's config in a file, and the last of each flag alone."""
    last: dict[str, list[str]] = {}
    for given in question.split("--")[1:]:
        flag, *values = given.split()
        last[f"--{flag}"] = values
    if isinstance(model, dict):
        config = path / "config.json"
        config.write_text(json.dumps(model))
        model = str(config)
    return [model, *(word for flag, values in last.items() for word in (flag, *values))]


def measured(memory: dict[str, Any], meter: str) -> float:
    """What the source's meter shows, in GiB: a peak of PyTorch's, or what one stage has allocated at its peak."""
    if meter != "last stage":
        return memory["meters"][meter]["estimate"] / 2**30
    stage = memory["stages"][-1]
    return sum(stage[part] for part in ("weights", "gradients", "optimizer", "saved", "working", "passing")) / 2**30


@pytest.mark.parametrize("peak", PEAKS, ids=lambda peak: f"{peak.gib:.1f}")
def test_a_published_peak_is_met(peak: Peak, tmp_path: Path) -> None:
    memory = run("ledger", *asked(tmp_path, peak.model, peak.question), "--json").json()["memory"]
    assert measured(memory, peak.meter) == pytest.approx(peak.gib, rel=peak.within), peak.source


@pytest.mark.parametrize(("source", "model", "question"), OUT_OF_MEMORY)
def test_what_ran_out_does_not_fit(source: str, model: str | dict[str, Any], question: str, tmp_path: Path) -> None:
    assert answer("ledger", *asked(tmp_path, model, question), code=3)["memory"]["fits"] is False, source
