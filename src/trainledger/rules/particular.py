"""Rules of single engines that no profile says: what their code asserts, or does without a word."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainledger.arrays import IntArray, ceil_div, ints
from trainledger.dtypes import bytes_of
from trainledger.facts.model import Tensor
from trainledger.plans import partition, sharding
from trainledger.plans.plan import Plans, make_plans
from trainledger.plans.setting import Setting
from trainledger.rules.rule import Mask, Rule
from trainledger.units import format_bytes

HOST_OPTIMIZERS = ("adamw",)
"""What DeepSpeed both steps on the host and takes under ZeRO without being told that it is untested."""

DEEPSPEED, FSDP1, MEGATRON, TORCHTITAN = ("deepspeed",), ("fsdp1",), ("megatron",), ("torchtitan",)


def _routed(setting: Setting) -> bool:
    return any(block.moe for block in setting.model.blocks)


def _stages_beyond_1(setting: Setting, plans: Plans) -> Mask:
    return (plans.pp > 1) & (plans.zero_stage >= 2)


def _own_experts_at_3(setting: Setting, plans: Plans) -> Mask:
    return (plans.ep > 1) & (plans.zero_stage == 3)


def _tokens_of_tp_and_cp(setting: Setting, plans: Plans) -> Mask:
    """The factor 2 of load balancing stays even without context parallelism. [torchtitan: parallel_dims.py 665-668]"""
    return setting.workload.seq % (plans.tp * 2 * plans.cp) != 0


def _experts_without_sp(setting: Setting, plans: Plans) -> Mask:
    return (plans.tp > 1) & (plans.sp == 0) & _routed(setting)


def _grad_dtype(setting: Setting, plans: Plans) -> Mask:
    """Stage 0 accumulates in the dtype of the weights. [deepspeed: engine.py 2007-2021]"""
    chosen, recipe = setting.scenario.grad_dtype, setting.precision
    mixed = bool(chosen) and recipe is not None and chosen != recipe.weight
    return (plans.zero_stage == 0) & mixed


def _bf16_pipeline(setting: Setting, plans: Plans) -> Mask:
    """Megatron-DeepSpeed says stage 0 in its JSON, and is accounted for as the stage 1 that it is."""
    recipe = setting.precision
    said = (plans.zero_stage == 0) | (setting.profile.name == "megatron-deepspeed")
    return (plans.pp > 1) & said & (recipe is not None and recipe.weight == "bf16")


def _bf16_pipeline_sentence(setting: Setting, row: dict[str, int]) -> str:
    said = 0 if setting.profile.name == "megatron-deepspeed" else row["zero_stage"]
    return (
        f"--zero {said} with pp={row['pp']} in bf16: DeepSpeed divides the optimizer all the same, as at zero_stage 1; "
        "expect that"
    )


def _leaf_modules(setting: Setting, plans: Plans) -> Mask:
    return (plans.zero_stage == 3) & (plans.ep == 1) & _routed(setting)


def _whole_4bit(setting: Setting, plans: Plans) -> Mask:
    return (plans.zero_stage == 3) & (setting.workload.qlora and not setting.profile.shards_quantised)


def _muon(setting: Setting, plans: Plans) -> Mask:
    return (plans.zero_stage > 0) & (setting.scenario.optimizer == "muon")


def _precision_aware(setting: Setting, plans: Plans) -> Mask:
    """Moments in fewer bits, and with them a master, are what makes it precision-aware."""
    return (plans.zero_stage == 0) & (setting.scenario.optimizer in setting.profile.optimizer_master)


def _hybrid_device(setting: Setting, plans: Plans) -> Mask:
    offloads = "optimizer" in setting.scenario.offload
    return ((plans.zero_stage > 1) | (setting.scenario.optimizer != "adamw")) & offloads


def _host_step(setting: Setting, plans: Plans) -> bool:
    """With the optimizer offloaded DeepSpeed steps with its own CPU Adam. [deepspeed: engine.py 2043-2049]"""
    return "optimizer" in setting.scenario.offload and setting.scenario.optimizer not in HOST_OPTIMIZERS


def _untested(setting: Setting, plans: Plans) -> Mask:
    """Optimizers outside ZeRO's list. [deepspeed: zero/utils.py 45-61]"""
    return (plans.zero_stage > 0) & (setting.scenario.optimizer not in HOST_OPTIMIZERS)


def _tied_pipeline(setting: Setting, plans: Plans) -> Mask:
    return (plans.pp > 1) & setting.model.tied


def _context_shards(setting: Setting, plans: Plans) -> Mask:
    return (plans.cp > 1) & (plans.zero_stage == 0)


def _no_sync_sentence(setting: Setting, row: dict[str, int]) -> str:
    recipe = setting.recipe
    whole = bytes_of(ints(setting.model.total_params), recipe.gathered)
    return (
        f"{row['num_microbatches']} micro-batches: accelerate's no_sync keeps whole gradients until the last, "
        f"{format_bytes(int(whole[0]))} a GPU; sync_each_batch reduces each one and keeps shards"
    )


def linears(setting: Setting) -> Iterator[Tensor]:
    """The weight matrices that an FP8 recipe covers."""
    for block in setting.model.blocks:
        yield from (tensor for tensor in block.tensors if tensor.projection)


def local_sides(tensor: Tensor, plans: Plans) -> tuple[IntArray, IntArray]:
    """[plans]: rows and columns that one rank holds."""
    over = plans.etp if tensor.role == "expert" else plans.tp
    rows, rest = tensor.shape[0], tensor.numel // tensor.shape[0]
    cut = partition.by_units(rest if tensor.tp_dim == 1 else rows, tensor.tp_units, over)
    whole = np.ones_like(over)
    return cut if tensor.tp_dim == 0 else rows * whole, cut if tensor.tp_dim == 1 else rest * whole


def _off_multiple(setting: Setting, plans: Plans, multiple: int) -> Mask:
    """Where a side of some weight matrix is no multiple."""
    broken = np.zeros(len(plans), dtype=np.bool_)
    for tensor in linears(setting):
        rows, columns = local_sides(tensor, plans)
        broken |= (rows % multiple != 0) | (columns % multiple != 0)
    return broken


def _te_dims(setting: Setting, plans: Plans) -> Mask | bool:
    """TransformerEngine refuses matrices off the recipe's multiple, activations too. [te: utils.py 222-243, 614-624]"""
    recipe = setting.precision
    if recipe is None or not recipe.fp8:
        return False
    tokens = plans.tokens(setting.workload.seq)
    return (tokens % recipe.gemm_multiple != 0) | _off_multiple(setting, plans, recipe.gemm_multiple)


def _te_dims_sentence(setting: Setting, row: dict[str, int]) -> str:
    multiple = setting.recipe.gemm_multiple
    plans = make_plans(row)
    tokens = int(plans.tokens(setting.workload.seq)[0])
    need = f"--precision {setting.scenario.precision} multiplies matrices whose sizes are multiples of {multiple}"
    for tensor in linears(setting):
        rows, columns = (int(size[0]) for size in local_sides(tensor, plans))
        if rows % multiple or columns % multiple:
            return f"{need}, and {tensor.name} is {rows} x {columns} at tp={row['tp']}; lower --tp, or use bf16"
    return f"{need}, and a micro-batch has seq / cp x mbs = {tokens} tokens on a rank; change --seq, --cp or --mbs"


def _ao_skips(setting: Setting, plans: Plans) -> Mask | bool:
    """A matrix off the multiple is left as it is. [torchao: float8_linear_utils.py 173-190]"""
    recipe = setting.precision
    return recipe is not None and recipe.fp8 and _off_multiple(setting, plans, recipe.gemm_multiple)


def _te_keeps_weights(setting: Setting, plans: Plans) -> bool:
    return setting.precision is not None and setting.precision.fp8


def _uneven_rows(setting: Setting, plans: Plans) -> Mask | bool:
    """Stacked experts are cut along their rows where more ranks than local experts share them, and only evenly."""
    if not setting.profile.experts_stacked:
        return False
    broken = np.zeros(len(plans), dtype=np.bool_)
    over = sharding.shard_group(plans, expert=True)
    for block in setting.model.blocks:
        for tensor in block.tensors:
            if tensor.role == "expert":
                rows, _ = local_sides(tensor, plans)
                broken |= (over > ceil_div(tensor.copies, plans.ep)) & (rows % over != 0)
    return broken & (plans.zero_stage > 0)


def _uneven_rows_sentence(setting: Setting, row: dict[str, int]) -> str:
    ranks = row["tp"] * row["cp"] * row["dp_shard"] // (row["etp"] * row["ep"])
    return (
        f"{ranks} ranks share the routed experts of one rank, more than it has, so that their rows are divided, "
        "and not evenly; raise --ep, or change --dp-shard"
    )


RULES: tuple[Rule, ...] = (
    Rule(
        "ds-zero-ge2-with-pp",
        "refuse",
        "engine",
        "DeepSpeed runtime/pipe/engine.py 76-77 at edaa722",
        _stages_beyond_1,
        "--zero {zero_stage} with pp={pp}: DeepSpeed's pipeline engine runs --zero 0 and 1 only; use --zero 1, or pp 1",
        DEEPSPEED,
    ),
    Rule(
        "ds-moe-zero3",
        "refuse",
        "engine",
        "DeepSpeed runtime/engine.py 1885-1893 at edaa722",
        _own_experts_at_3,
        "--zero 3 with ep={ep}: DeepSpeed's own MoE layers refuse zero_stage 3; use --zero 2, or ep 1",
        DEEPSPEED,
    ),
    Rule(
        "tt-seq",
        "refuse",
        "engine",
        "torchtitan distributed/parallel_dims.py 665-668 at b5bcd76",
        _tokens_of_tp_and_cp,
        "--seq {seq} is not a multiple of tp x 2 x cp = {tp} x 2 x {cp}; change --seq, --tp or --cp",
        TORCHTITAN,
    ),
    Rule(
        "moe-tp-needs-sp",
        "refuse",
        "engine",
        "Megatron-Core transformer/moe/moe_layer.py 636-640 at d98e8a6",
        _experts_without_sp,
        "tp={tp} without --sp: Megatron trains MoE layers under tensor parallelism only with it; add --sp",
        MEGATRON,
    ),
    Rule(
        "ds-grad-dtype-needs-zero",
        "refuse",
        "engine",
        "DeepSpeed runtime/engine.py 2007-2021 at edaa722: unsupported mix",
        _grad_dtype,
        (
            "--grad-dtype {grad_dtype} at --zero 0: DeepSpeed accumulates in the dtype of the weights there; "
            "use --zero 1, or leave --grad-dtype out"
        ),
        DEEPSPEED,
    ),
    Rule(
        "mg-muon",
        "refuse",
        "engine",
        "Megatron-LM arguments.py 1725-1740 at d98e8a6: a layer-wise optimizer at stage 1, none under Megatron-FSDP",
        _muon,
        (
            "--optimizer muon at --zero {zero_stage}: Megatron deals out whole layers instead of dividing states, "
            "which is not accounted for; use --zero 0, or --optimizer adamw"
        ),
        MEGATRON,
    ),
    Rule(
        "mg-offload",
        "refuse",
        "engine",
        "Megatron-LM arguments.py 1884-1892 at d98e8a6; cpu_offloading/hybrid_optimizer.py",
        _hybrid_device,
        (
            "--offload optimizer with --zero {zero_stage} and --optimizer {optimizer}: Megatron steps fp32 copies with "
            "AdamW on the host, by the distributed optimizer; use --zero 1 and --optimizer adamw"
        ),
        MEGATRON,
    ),
    Rule(
        "ds-offload-optimizer",
        "refuse",
        "engine",
        "DeepSpeed runtime/engine.py 2043-2049 at edaa722",
        _host_step,
        (
            "--offload optimizer with --optimizer {optimizer}: DeepSpeed steps on the host with its CPU Adam only "
            "(zero_force_ds_cpu_optimizer); use --optimizer adamw, or leave --offload out"
        ),
        DEEPSPEED,
    ),
    Rule(
        "tt-tied-pp",
        "refuse",
        "engine",
        "torchtitan models/common/decoder.py 168-171 at b5bcd76",
        _tied_pipeline,
        "pp={pp} and {model} ties its output layer to its embedding: torchtitan cannot split such a model; set pp to 1",
        TORCHTITAN,
    ),
    Rule(
        "tt-cp-shards",
        "refuse",
        "engine",
        "torchtitan distributed/parallel_dims.py at b5bcd76: the fsdp axis is dp_shard x cp",
        _context_shards,
        "cp={cp} at --zero 0: torchtitan always divides states over context-parallel ranks; use --zero 3 or 2, or cp 1",
        TORCHTITAN,
    ),
    Rule(
        "fsdp1-one-rank",
        "refuse",
        "engine",
        "PyTorch fsdp/_init_utils.py _init_core_state at 2.13.0: one rank shards nothing, whatever it is told",
        lambda setting, plans: sharding.shard_group(plans, expert=False) == 1,
        "--engine fsdp1 and no ranks to share: FSDP would be NO_SHARD; raise dp, or use --engine pytorch",
        FSDP1,
    ),
    Rule(
        "fsdp1-no-sync",
        "advise",
        "engine",
        "accelerate accelerator.py 1282-1291 at 1.10.1",
        lambda setting, plans: (plans.num_microbatches > 1) & setting.profile.memory.no_sync,
        _no_sync_sentence,
        FSDP1,
    ),
    Rule(
        "fsdp2-even-rows",
        "refuse",
        "engine",
        "PyTorch _fully_shard/_fsdp_param.py: no uneven sharding on a dimension other than 0",
        _uneven_rows,
        _uneven_rows_sentence,
    ),
    Rule(
        "fp8-dims",
        "refuse",
        "engine",
        "TransformerEngine pytorch/utils.py 222-243 and 614-624 at d0067d0",
        _te_dims,
        _te_dims_sentence,
        MEGATRON,
    ),
    Rule(
        "mg-precision-aware",
        "warn",
        "engine",
        "Megatron-Core optimizer/__init__.py 1057-1060 at d98e8a6",
        _precision_aware,
        "--optimizer {optimizer} at --zero 0: Megatron's precision-aware optimizer is a distributed one; use --zero 1",
        MEGATRON,
    ),
    Rule(
        "ds-untested-optimizer",
        "advise",
        "engine",
        "DeepSpeed runtime/zero/utils.py 45-61 and engine.py 1989-1992 at edaa722",
        _untested,
        (
            "--optimizer {optimizer} at --zero {zero_stage} is not on DeepSpeed's list; it asks for "
            "zero_allow_untested_optimizer"
        ),
        DEEPSPEED,
    ),
    Rule(
        "bf16-optimizer-is-zero1",
        "advise",
        "engine",
        "DeepSpeed runtime/engine.py 2014-2018 at edaa722",
        _bf16_pipeline,
        _bf16_pipeline_sentence,
        ("deepspeed", "megatron-deepspeed"),
    ),
    Rule(
        "ds-z3-leaf",
        "advise",
        "engine",
        "DeepSpeed pull requests 4966 and 5008",
        _leaf_modules,
        "--zero 3 with routed experts: mark their blocks with set_z3_leaf_modules, or ranks that route apart hang",
        DEEPSPEED,
    ),
    Rule(
        "z3-does-not-shard-4bit",
        "advise",
        "engine",
        "bitsandbytes parameters under DeepSpeed stage 3",
        _whole_4bit,
        "--qlora at --zero 3: every rank keeps the 4-bit weights whole; use --engine pytorch to divide them",
    ),
    Rule(
        "fp8-does-not-save-weights",
        "advise",
        "engine",
        "TransformerEngine pytorch/module/linear.py 467-489 at d0067d0",
        _te_keeps_weights,
        "--precision {precision} keeps 16-bit weights and FP8 copies: it saves time, not memory; raise --zero for it",
        MEGATRON,
    ),
    Rule(
        "fp8-dims-skipped",
        "advise",
        "engine",
        "torchao float8/float8_linear_utils.py 173-190 at 36027d8",
        _ao_skips,
        (
            "--precision {precision} at tp={tp}: a linear layer has a side that is no multiple of 16, so torchao "
            "leaves it in 16 bits without a word; lower --tp"
        ),
        ("pytorch", "torchtitan"),
    ),
)
