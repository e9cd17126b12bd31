"""Rules of single engines that no profile says: what their code asserts, or does without a word."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from trainledger.arrays import IntArray, ceil_div
from trainledger.facts.model import Tensor
from trainledger.plans import sharding
from trainledger.plans.plan import Plans
from trainledger.plans.setting import Setting
from trainledger.rules.rule import Mask, Rule, Severity

PRECISION_AWARE = ("adamw-bf16", "adamw-fp8")
"""Megatron's --exp-avg-dtype and --exp-avg-sq-dtype need --use-precision-aware-optimizer."""

HOST_OPTIMIZERS = ("adamw",)
"""What DeepSpeed both steps on the host and takes under ZeRO without being told that it is untested."""

GEMM_MULTIPLE = {"mxfp8": 32}
"""What both sides of a matrix must be a multiple of; 16 for the other recipes. [te: utils.py 222-243, 614-624]"""


def _all(plans: Plans, broken: bool) -> Mask:
    return np.full(len(plans), broken)


def _is(setting: Setting, *engines: str) -> bool:
    return setting.profile.name in engines


def _stages_beyond_1(setting: Setting, plans: Plans) -> Mask:
    return (plans.pp > 1) & (plans.zero_stage >= 2) & _is(setting, "deepspeed")


def _own_experts_at_3(setting: Setting, plans: Plans) -> Mask:
    return (plans.ep > 1) & (plans.zero_stage == 3) & _is(setting, "deepspeed")


def _tokens_of_tp_and_cp(setting: Setting, plans: Plans) -> Mask:
    """The factor 2 of load balancing stays even without context parallelism. [torchtitan: parallel_dims.py 665-668]"""
    return (setting.workload.seq % (plans.tp * 2 * plans.cp) != 0) & _is(setting, "torchtitan")


def _experts_without_sp(setting: Setting, plans: Plans) -> Mask:
    routed = _is(setting, "megatron") and any(block.moe for block in setting.model.blocks)
    return (plans.tp > 1) & (plans.sp == 0) & routed


def _grad_dtype(setting: Setting, plans: Plans) -> Mask:
    """Stage 0 accumulates in the dtype of the weights. [deepspeed: engine.py 2007-2021]"""
    chosen, recipe = setting.scenario.grad_dtype, setting.precision
    mixed = bool(chosen) and recipe is not None and chosen != recipe.weight
    return (plans.zero_stage == 0) & (_is(setting, "deepspeed") and mixed)


def _bf16_pipeline(setting: Setting, plans: Plans) -> Mask:
    recipe = setting.precision
    bf16 = _is(setting, "deepspeed") and recipe is not None and recipe.weight == "bf16"
    return (plans.pp > 1) & (plans.zero_stage == 0) & bf16


def _leaf_modules(setting: Setting, plans: Plans) -> Mask:
    routed = _is(setting, "deepspeed") and any(block.moe for block in setting.model.blocks)
    return (plans.zero_stage == 3) & (plans.ep == 1) & routed


def _whole_4bit(setting: Setting, plans: Plans) -> Mask:
    return (plans.zero_stage == 3) & (setting.workload.qlora and not setting.profile.shards_quantised)


def _muon(setting: Setting, plans: Plans) -> Mask:
    return (plans.zero_stage > 0) & (_is(setting, "megatron") and setting.scenario.optimizer == "muon")


def _precision_aware(setting: Setting, plans: Plans) -> Mask:
    return (plans.zero_stage == 0) & (_is(setting, "megatron") and setting.scenario.optimizer in PRECISION_AWARE)


def _hybrid_device(setting: Setting, plans: Plans) -> Mask:
    offloads = _is(setting, "megatron") and "optimizer" in setting.scenario.offload
    return ((plans.zero_stage > 1) | (setting.scenario.optimizer != "adamw")) & offloads


def _host_step(setting: Setting, plans: Plans) -> Mask:
    """With the optimizer offloaded DeepSpeed steps with its own CPU Adam. [deepspeed: engine.py 2043-2049]"""
    offloads = _is(setting, "deepspeed") and "optimizer" in setting.scenario.offload
    return _all(plans, offloads and setting.scenario.optimizer not in HOST_OPTIMIZERS)


def _untested(setting: Setting, plans: Plans) -> Mask:
    """Optimizers outside ZeRO's list. [deepspeed: zero/utils.py 45-61]"""
    return (plans.zero_stage > 0) & (_is(setting, "deepspeed") and setting.scenario.optimizer not in HOST_OPTIMIZERS)


def _tied_pipeline(setting: Setting, plans: Plans) -> Mask:
    return (plans.pp > 1) & (_is(setting, "torchtitan") and setting.model.tied)


def _context_shards(setting: Setting, plans: Plans) -> Mask:
    return (plans.cp > 1) & (plans.zero_stage == 0) & _is(setting, "torchtitan")


def _linears(setting: Setting) -> Iterator[Tensor]:
    """The weight matrices that an FP8 recipe covers."""
    for block in setting.model.blocks:
        yield from (t for t in block.tensors if t.linear and t.role not in ("head", "embedding", "router"))


def _local(tensor: Tensor, plans: Plans) -> tuple[IntArray, IntArray]:
    """[plans]: rows and columns that one rank holds."""
    over = plans.etp if tensor.role == "expert" else plans.tp
    rows, rest = tensor.shape[0], tensor.numel // tensor.shape[0]
    length = rest if tensor.tp_dim == 1 else rows
    units = tensor.tp_units or length
    cut = ceil_div(units, over) * (length // units)
    whole = np.ones_like(over)
    return cut if tensor.tp_dim == 0 else rows * whole, cut if tensor.tp_dim == 1 else rest * whole


def _te_dims(setting: Setting, plans: Plans) -> Mask:
    recipe = setting.precision
    if not _is(setting, "megatron") or recipe is None or not recipe.fp8:
        return _all(plans, broken=False)
    multiple = GEMM_MULTIPLE.get(setting.scenario.precision, 16)
    broken = ceil_div(setting.workload.seq, plans.cp) * plans.mbs % multiple != 0
    for tensor in _linears(setting):
        rows, columns = _local(tensor, plans)
        broken |= (rows % multiple != 0) | (columns % multiple != 0)
    return broken


def _te_dims_sentence(setting: Setting, row: dict[str, int]) -> str:
    multiple = GEMM_MULTIPLE.get(setting.scenario.precision, 16)
    plans = Plans(**{name: np.array([value]) for name, value in row.items()})
    tokens = -(-setting.workload.seq // row["cp"]) * row["mbs"]
    need = f"--precision {setting.scenario.precision} multiplies matrices whose sizes are multiples of {multiple}"
    for tensor in _linears(setting):
        rows, columns = (int(size[0]) for size in _local(tensor, plans))
        if rows % multiple or columns % multiple:
            return f"{need}, and {tensor.name} is {rows} x {columns} at tp={row['tp']}; lower --tp, or use bf16"
    return f"{need}, and a micro-batch has seq / cp x mbs = {tokens} tokens on a rank; change --seq, --cp or --mbs"


def _ao_skips(setting: Setting, plans: Plans) -> Mask:
    recipe = setting.precision
    if not _is(setting, "pytorch", "torchtitan") or recipe is None or not recipe.fp8:
        return _all(plans, broken=False)
    broken = _all(plans, broken=False)
    for tensor in _linears(setting):
        rows, columns = _local(tensor, plans)
        broken |= (rows % 16 != 0) | (columns % 16 != 0)
    return broken


def _te_keeps_weights(setting: Setting, plans: Plans) -> Mask:
    recipe = setting.precision
    return _all(plans, _is(setting, "megatron") and recipe is not None and recipe.fp8)


def _uneven_rows(setting: Setting, plans: Plans) -> Mask:
    """Stacked experts are cut along their rows where more ranks than local experts share them, and only evenly."""
    broken = _all(plans, broken=False)
    if not setting.profile.experts_stacked:
        return broken
    over = sharding.shard_group(plans, expert=True)
    for block in setting.model.blocks:
        for tensor in block.tensors:
            if tensor.role == "expert":
                rows, _ = _local(tensor, plans)
                broken |= (over > ceil_div(tensor.copies, plans.ep)) & (rows % over != 0)
    return broken & (plans.zero_stage > 0)


def _rule(rule: str, severity: Severity, source: str, broken: Callable[[Setting, Plans], Mask], text: str) -> Rule:
    def sentence(setting: Setting, row: dict[str, int]) -> str:
        ranks = row["tp"] * row["cp"] * row["dp_shard"] // (row["etp"] * row["ep"])
        scenario = setting.scenario
        return text.format(
            precision=scenario.precision,
            optimizer=scenario.optimizer,
            grad_dtype=scenario.grad_dtype,
            model=setting.model.name,
            seq=setting.workload.seq,
            expert_ranks=ranks,
            **row,
        )

    return Rule(id=rule, severity=severity, scope="engine", source=source, broken=broken, sentence=sentence)


RULES: tuple[Rule, ...] = (
    _rule(
        "ds-zero-ge2-with-pp",
        "refuse",
        "DeepSpeed runtime/pipe/engine.py 76-77 at edaa722",
        _stages_beyond_1,
        "--zero {zero_stage} with pp={pp}: DeepSpeed's pipeline engine runs stages 0 and 1 only; use --zero 1, or pp 1",
    ),
    _rule(
        "ds-moe-zero3",
        "refuse",
        "DeepSpeed runtime/engine.py 1885-1893 at edaa722",
        _own_experts_at_3,
        "--zero 3 with ep={ep}: DeepSpeed's own MoE layers refuse stage 3; use --zero 2, or ep 1",
    ),
    _rule(
        "tt-seq",
        "refuse",
        "torchtitan distributed/parallel_dims.py 665-668 at b5bcd76",
        _tokens_of_tp_and_cp,
        "--seq {seq} is not a multiple of tp x 2 x cp = {tp} x 2 x {cp}; change --seq, --tp or --cp",
    ),
    _rule(
        "moe-tp-needs-sp",
        "refuse",
        "Megatron-Core transformer/moe/moe_layer.py 636-640 at d98e8a6",
        _experts_without_sp,
        "tp={tp} without --sp: Megatron trains MoE layers under tensor parallelism only with it; add --sp",
    ),
    _rule(
        "ds-grad-dtype-needs-zero",
        "refuse",
        "DeepSpeed runtime/engine.py 2007-2021 at edaa722: unsupported mix",
        _grad_dtype,
        "--grad-dtype {grad_dtype} at --zero 0: DeepSpeed accumulates in the dtype of the weights there; "
        "use --zero 1, or leave --grad-dtype out",
    ),
    _rule(
        "mg-muon",
        "refuse",
        "Megatron-LM arguments.py 1725-1740 at d98e8a6: a layer-wise optimizer at stage 1, none under Megatron-FSDP",
        _muon,
        "--optimizer muon at --zero {zero_stage}: Megatron deals out whole layers instead of dividing states, which is "
        "not accounted for; use --zero 0, or --optimizer adamw",
    ),
    _rule(
        "mg-offload",
        "refuse",
        "Megatron-LM arguments.py 1884-1892 at d98e8a6; cpu_offloading/hybrid_optimizer.py",
        _hybrid_device,
        "--offload optimizer with --zero {zero_stage} and --optimizer {optimizer}: Megatron steps fp32 copies with "
        "AdamW on the host, by the distributed optimizer; use --zero 1 and --optimizer adamw",
    ),
    _rule(
        "ds-offload-optimizer",
        "refuse",
        "DeepSpeed runtime/engine.py 2043-2049 at edaa722",
        _host_step,
        "--offload optimizer with --optimizer {optimizer}: DeepSpeed steps on the host with its CPU Adam only "
        "(zero_force_ds_cpu_optimizer); use --optimizer adamw, or leave --offload out",
    ),
    _rule(
        "tt-tied-pp",
        "refuse",
        "torchtitan models/common/decoder.py 168-171 at b5bcd76",
        _tied_pipeline,
        "pp={pp} and {model} ties its output layer to its embedding: torchtitan cannot split such a model; set pp to 1",
    ),
    _rule(
        "tt-cp-shards",
        "refuse",
        "torchtitan distributed/parallel_dims.py at b5bcd76: the fsdp axis is dp_shard x cp",
        _context_shards,
        "cp={cp} at --zero 0: torchtitan always divides states over context-parallel ranks; use --zero 3 or 2, or cp 1",
    ),
    _rule(
        "fsdp2-even-rows",
        "refuse",
        "PyTorch _fully_shard/_fsdp_param.py: no uneven sharding on a dimension other than 0",
        _uneven_rows,
        "{expert_ranks} ranks share the routed experts of one rank, more than it has, so that their rows are divided, "
        "and not evenly; raise --ep, or change --dp-shard",
    ),
    Rule(
        id="fp8-dims",
        severity="refuse",
        scope="engine",
        source="TransformerEngine pytorch/utils.py 222-243 and 614-624 at d0067d0",
        broken=_te_dims,
        sentence=_te_dims_sentence,
    ),
    _rule(
        "mg-precision-aware",
        "warn",
        "Megatron-Core optimizer/__init__.py 1057-1060 at d98e8a6",
        _precision_aware,
        "--optimizer {optimizer} at --zero 0: Megatron's precision-aware optimizer is a distributed one; use --zero 1",
    ),
    _rule(
        "ds-untested-optimizer",
        "advise",
        "DeepSpeed runtime/zero/utils.py 45-61 and engine.py 1989-1992 at edaa722",
        _untested,
        "--optimizer {optimizer} at --zero {zero_stage} is not on DeepSpeed's list; it asks for "
        "zero_allow_untested_optimizer",
    ),
    _rule(
        "bf16-optimizer-is-zero1",
        "advise",
        "DeepSpeed runtime/engine.py 2014-2018 at edaa722",
        _bf16_pipeline,
        "--zero 0 with pp={pp} in bf16: DeepSpeed divides the optimizer all the same, as at stage 1; expect that",
    ),
    _rule(
        "ds-z3-leaf",
        "advise",
        "DeepSpeed pull requests 4966 and 5008",
        _leaf_modules,
        "--zero 3 with routed experts: mark their blocks with set_z3_leaf_modules, or ranks that route apart hang",
    ),
    _rule(
        "z3-does-not-shard-4bit",
        "advise",
        "bitsandbytes parameters under DeepSpeed stage 3",
        _whole_4bit,
        "--qlora at --zero 3: every rank keeps the 4-bit weights whole; use --engine pytorch to divide them",
    ),
    _rule(
        "fp8-does-not-save-weights",
        "advise",
        "TransformerEngine pytorch/module/linear.py 467-489 at d0067d0",
        _te_keeps_weights,
        "--precision {precision} keeps the 16-bit weights and adds FP8 copies of them: it saves time, not their memory",
    ),
    _rule(
        "fp8-dims-skipped",
        "advise",
        "torchao float8/float8_linear_utils.py 173-190 at 36027d8",
        _ao_skips,
        "--precision {precision} at tp={tp}: a linear layer has a side that is no multiple of 16, so torchao leaves it "
        "in 16 bits without a word; lower --tp",
    ),
)
