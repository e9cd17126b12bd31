"""What `check` alone says of a plan by its shapes and words: it runs, and nothing of it is counted wrong."""

from __future__ import annotations

import numpy as np

from trainledger.facts.trained import trained_in
from trainledger.plans.plan import Plans, make_plans
from trainledger.plans.setting import Setting
from trainledger.rules.particular import linears, local_sides
from trainledger.rules.rule import Mask, Rule

SMALL_SIDE = 2048
"""A matrix with a side of no more than this gains next to nothing in FP8. [torchao: float8_linear_utils.py 173-190]"""
SMALL_SHARE = 0.5
"""Above so much of the arithmetic in such matrices a run gains next to nothing."""
ALIGNED = 64
"""Sides of matrices that fill the tiles of 16-bit products. [nvidia-tiles]"""
AMPERE = (8, 0)
"""Compute capability from which the kernels of flash attention 2 run. [flash-attention: README]"""
MANY_EXPERTS = 32
"""Above so many experts in a layer each of their matrices is a gather too small for a link."""


def _fp8(setting: Setting) -> bool:
    return setting.precision is not None and setting.precision.fp8


def _small_share(setting: Setting, plans: Plans) -> tuple[np.ndarray, np.ndarray]:
    """([plans] elements of small matrices that a token meets, the same of all); of experts those that it visits."""
    small = np.zeros(len(plans), dtype=np.int64)
    every = np.zeros(len(plans), dtype=np.int64)
    for block in setting.model.blocks:
        for tensor in block.tensors:
            if not tensor.projection:
                continue
            rows, columns = local_sides(tensor, plans)
            visits = block.moe.top_k if tensor.role == "expert" and block.moe is not None else 1
            work = rows * columns * visits * len(block.layers)
            every += work
            small += np.where(np.minimum(rows, columns) <= SMALL_SIDE, work, 0)
    return small, every


def _small_gemm(setting: Setting, plans: Plans) -> Mask | bool:
    if not _fp8(setting) or setting.model.params_only:
        return False
    small, every = _small_share(setting, plans)
    return small > SMALL_SHARE * every


def _small_gemm_sentence(setting: Setting, row: dict[str, int]) -> str:
    small, every = _small_share(setting, make_plans(row))
    return (
        f"{int(small[0]) / int(every[0]):.0%} of the arithmetic of {setting.model.name}'s linear layers at "
        f"tp={row['tp']} is in matrices with a side of {SMALL_SIDE} or less, where FP8 gains 5 % at most; use bf16, "
        "or lower --tp"
    )


def _needs_compile(setting: Setting, plans: Plans) -> bool:
    return _fp8(setting) and bool(setting.profile.memory.compile) and not setting.compiled


def _unaligned(setting: Setting, plans: Plans) -> Mask:
    broken = np.zeros(len(plans), dtype=np.bool_)
    for tensor in linears(setting):
        rows, columns = local_sides(tensor, plans)
        broken |= (rows % ALIGNED != 0) | (columns % ALIGNED != 0)
    return broken


def _unaligned_sentence(setting: Setting, row: dict[str, int]) -> str:
    plans = make_plans(row)
    for tensor in linears(setting):
        rows, columns = (int(size[0]) for size in local_sides(tensor, plans))
        if rows % ALIGNED or columns % ALIGNED:
            return (
                f"{tensor.name} is {rows} x {columns} on one rank of tp={row['tp']}, and a side is no multiple of "
                f"{ALIGNED}: its products leave tiles part empty; change --tp, or the model's width"
            )
    raise AssertionError("asked for where every matrix is aligned")


def _no_flash(setting: Setting, plans: Plans) -> bool:
    card = setting.accelerator
    known = card is not None and bool(card.capability)
    return setting.scenario.attention == "flash" and known and card is not None and card.capability < AMPERE


def _no_flash_sentence(setting: Setting, row: dict[str, int]) -> str:
    card = setting.accelerator
    have = f"{card.name} has {'.'.join(map(str, card.capability))}" if card is not None else ""
    return (
        f"the kernels of flash attention 2 need compute capability 8.0 and {have}: PyTorch's own memory-efficient "
        "kernel takes their place, other packages refuse; use --attention eager if the run materialises its scores"
    )


def _over_pcie(setting: Setting, plans: Plans) -> Mask | bool:
    card, cluster = setting.accelerator, setting.cluster
    if cluster is not None:
        return (plans.gpus > 1) & (cluster.scale_up_domain == 1)
    stated = card.facts.get("link.one_way") if card is not None else None
    return (plans.gpus > 1) & (stated is not None and stated.value is False)


def _fp16_of_bf16(setting: Setting, plans: Plans) -> bool:
    recipe = setting.precision
    found = trained_in(setting.model.name)
    return recipe is not None and recipe.activation == "fp16" and found is not None and found.value == "bf16"


def _ends_as_layers(setting: Setting, plans: Plans) -> Mask:
    """Layers that divide over the stages only with embedding and output layer counted as one each."""
    layers = setting.model.num_layers
    return (plans.pp > 1) & (layers % plans.pp != 0) & ((layers + 2) % plans.pp == 0)


def _routed_copies(setting: Setting, plans: Plans) -> bool:
    return any(block.moe is not None and block.moe.top_k > 1 for block in setting.model.blocks)


def _routed_copies_sentence(setting: Setting, row: dict[str, int]) -> str:
    plans = make_plans(row)
    moe = max((block.moe for block in setting.model.blocks if block.moe is not None), key=lambda moe: moe.top_k)
    tokens = int(plans.tokens(setting.workload.seq)[0]) // int(plans.sp_ranks[0])
    return (
        f"each token visits {moe.top_k} experts, so {tokens} tokens of a rank are {moe.top_k * tokens} rows inside "
        "them, and what they keep grows alike; lower --mbs, or raise --ep, --tp or --cp"
    )


def _many_small_experts(setting: Setting, plans: Plans) -> Mask:
    most = max((block.moe.experts for block in setting.model.blocks if block.moe is not None), default=0)
    return (plans.zero_stage == 3) & (plans.ep == 1) & (most > MANY_EXPERTS)


def _many_small_experts_sentence(setting: Setting, row: dict[str, int]) -> str:
    blocks = [block for block in setting.model.blocks if block.moe is not None]
    matrices = sum(t.copies * len(b.layers) for b in blocks for t in b.tensors if t.role == "expert" and t.linear)
    least = min(t.numel for b in blocks for t in b.tensors if t.role == "expert" and t.linear)
    return (
        f"--zero 3 gathers {matrices:,} matrices of experts, some of {least:,} elements, in a pass: messages too small "
        "for a link; mark the blocks as leaves, or use an engine with --ep"
    )


def _uneven_chunks(setting: Setting, plans: Plans) -> Mask | bool:
    """The tokens of a chunked loss are cut into equal parts. [torchtitan: components/loss.py 605]"""
    if setting.scenario.loss != "chunked" or setting.loss_chunks < 1:
        return False
    return (setting.workload.seq // plans.cp) % setting.loss_chunks != 0


RULES: tuple[Rule, ...] = (
    Rule(
        id="fp8-small-gemm",
        severity="warn",
        scope="check",
        source="torchao float8/float8_linear_utils.py at 36027d8, the sizes that its filter leaves out",
        broken=_small_gemm,
        sentence=_small_gemm_sentence,
    ),
    Rule(
        id="fp8-needs-compile",
        severity="warn",
        scope="check",
        source="torchtitan docs/float8.md: torch.compile is what makes it competitive",
        broken=_needs_compile,
        sentence="--precision {precision} without torch.compile casts in kernels of their own; use --compile on",
    ),
    Rule(
        id="fp16-of-bf16-model",
        severity="warn",
        scope="check",
        source="data/trained_in.toml",
        broken=_fp16_of_bf16,
        sentence=(
            "{model} was trained in bf16, whose activations reach beyond 65504, the largest number of fp16; "
            "use --precision bf16, or train it from its beginning"
        ),
    ),
    Rule(
        id="tt-chunked-loss",
        severity="warn",
        scope="check",
        source="torchtitan components/loss.py 605 at b5bcd76",
        broken=_uneven_chunks,
        sentence=lambda setting, row: (
            f"--seq {setting.workload.seq} / cp={row['cp']} is no multiple of the {setting.loss_chunks} chunks of the "
            "loss; change --loss-chunks"
        ),
        engines=("torchtitan",),
    ),
    Rule(
        id="gemm-alignment",
        severity="advise",
        scope="check",
        source="NVIDIA Deep Learning Performance Guide, matrix multiplication: tile quantisation",
        broken=_unaligned,
        sentence=_unaligned_sentence,
    ),
    Rule(
        id="flash2-on-turing",
        severity="advise",
        scope="check",
        source="flash-attention README: Ampere, Ada or Hopper GPUs",
        broken=_no_flash,
        sentence=_no_flash_sentence,
    ),
    Rule(
        id="pcie-no-nvlink",
        severity="advise",
        scope="check",
        source="the accelerator's or the cluster's data file",
        broken=_over_pcie,
        sentence="the cards have no fast link among them, so all that {gpus} GPUs send goes over PCIe; keep tp at 1",
    ),
    Rule(
        id="embedding-counts-as-layer",
        severity="advise",
        scope="check",
        source="Megatron-LM arguments.py 968-997 at d98e8a6; Megatron-DeepSpeed --pp-partition-method",
        broken=_ends_as_layers,
        sentence=(
            "{layers} layers divide over pp={pp} only with embedding and output layer counted as one layer each; "
            "give --pp-layout with one layer less at each end"
        ),
        engines=("megatron", "megatron-deepspeed"),
    ),
    Rule(
        id="mtp-embedding-copy",
        severity="advise",
        scope="check",
        source="Megatron-Core transformer/multi_token_prediction.py at d98e8a6",
        broken=lambda setting, plans: (plans.pp > 1) & setting.workload.mtp,
        sentence=lambda setting, row: (
            f"--mtp with pp={row['pp']}: the last stage keeps a second embedding, "
            f"{setting.model.vocab_size * setting.model.hidden_size // row['tp']:,} elements on a rank; "
            "give that stage fewer layers by --pp-layout"
        ),
    ),
    Rule(
        id="dpo-doubles-batch",
        severity="advise",
        scope="check",
        source="trl trainer/dpo_trainer.py concatenated_forward: chosen and rejected answers in one pass",
        broken=lambda setting, plans: setting.workload.frozen_copy > 0,
        sentence=(
            "a frozen copy beside the model is what a preference loss has, and that runs chosen and rejected answers "
            "at once: mbs={mbs} pairs are twice as many sequences; give --mbs doubled"
        ),
    ),
    Rule(
        id="moe-topk-activation",
        severity="advise",
        scope="check",
        source="the model's config",
        broken=_routed_copies,
        sentence=_routed_copies_sentence,
    ),
    Rule(
        id="z3-moe-small-modules",
        severity="advise",
        scope="check",
        source="DeepSpeed runtime/zero/partitioned_param_coordinator.py at edaa722: a gather for each module",
        broken=_many_small_experts,
        sentence=_many_small_experts_sentence,
        engines=("deepspeed",),
    ),
)
