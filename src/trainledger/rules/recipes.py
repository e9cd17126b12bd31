"""What the program's FP8 recipes and optimizers in 8 bits cannot do: asked before a process is started.

torchao leaves out a layer that it cannot or would rather not convert, and says nothing; here every matrix of the blocks
is multiplied in FP8, or the run is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainledger.facts.model import Tensor
from trainledger.plans import partition, sharding
from trainledger.plans.plan import Plans, make_plans
from trainledger.plans.setting import Setting
from trainledger.rules.rule import Mask, Rule

FORWARD_ONLY = "fp8-forward"
GATHERS_FP8 = "fp8-tensorwise"
MULTIPLE = 16
"""Of the inner side and of the columns of an FP8 product. [torch: native/cuda/ScaledBlas.cpp, _scaled_mm]"""

TRANSPOSED = ("gpt2",)
"""Families that keep matrices as [in, out], in modules of their own."""


def _fp8(setting: Setting) -> bool:
    return setting.precision is not None and setting.precision.fp8


def _matrices(setting: Setting) -> Iterator[Tensor]:
    """Weights that become FP8 layers: one for each distinct tensor of a block."""
    for block in setting.model.blocks:
        yield from (tensor for tensor in block.tensors if tensor.projection and tensor.role != "expert")


def _none(setting: Setting, plans: Plans) -> bool:
    return _fp8(setting) and (setting.model.family in TRANSPOSED or not any(_matrices(setting)))


def _local(tensor: Tensor, plans: Plans) -> tuple[Mask, Mask]:
    """[plans]: rows and columns that one rank multiplies with."""
    sides = [np.full(len(plans), size) for size in tensor.shape]
    if tensor.tp_dim is not None:
        sides[tensor.tp_dim] = partition.by_units(tensor.shape[tensor.tp_dim], tensor.tp_units, plans.tp)
    return sides[0], sides[1]


def _off_sixteen(setting: Setting, plans: Plans) -> Mask | bool:
    if not _fp8(setting):
        return False
    broken = np.zeros(len(plans), dtype=np.bool_)
    for tensor in _matrices(setting):
        for side in _local(tensor, plans):
            broken |= side % MULTIPLE != 0
    if setting.scenario.precision != FORWARD_ONLY:
        broken |= plans.tokens(setting.workload.seq) % MULTIPLE != 0
    return broken


def _off_sixteen_sentence(setting: Setting, row: dict[str, int]) -> str:
    plans = make_plans(row)
    need = f"--precision {setting.scenario.precision} multiplies matrices with sides that are multiples of {MULTIPLE}"
    for tensor in _matrices(setting):
        rows, columns = (int(side[0]) for side in _local(tensor, plans))
        if rows % MULTIPLE or columns % MULTIPLE:
            return (
                f"{need}, and {tensor.name} is {rows} x {columns} on a rank at tp={row['tp']}; lower --tp, change the "
                "sizes with --set, or use bf16"
            )
    tokens = int(plans.tokens(setting.workload.seq)[0])
    return f"{need}, and a micro-batch has seq / cp x mbs = {tokens} tokens on a rank; change --seq, --cp or --mbs"


def _uneven_rows(setting: Setting, plans: Plans) -> Mask | bool:
    """FSDP2 pads what it gathers itself, and not what a tensor says it wants gathered. [torch: _fsdp_param.py]"""
    if setting.scenario.precision != GATHERS_FP8:
        return False
    ranks = np.where(plans.zero_stage > 0, sharding.shard_group(plans, expert=False), 1)
    broken = np.zeros(len(plans), dtype=np.bool_)
    for tensor in _matrices(setting):
        broken |= _local(tensor, plans)[0] % ranks != 0
    return broken


def _uneven_rows_sentence(setting: Setting, row: dict[str, int]) -> str:
    plans = make_plans(row)
    ranks = int(sharding.shard_group(plans, expert=False)[0])
    tensor, rows = next(
        (tensor, rows) for tensor in _matrices(setting) if (rows := int(_local(tensor, plans)[0][0])) % ranks
    )
    return (
        f"--precision {GATHERS_FP8} gathers weights in FP8, which FSDP2 does not pad, and {ranks} ranks do not divide "
        f"the {rows} rows of {tensor.name}; change --dp-shard, or use fp8-rowwise"
    )


def _all_fp8(setting: Setting, plans: Plans) -> Mask | bool:
    """Where a unit has nothing but matrices, FSDP2 gathers it as FP8 and not as bytes. [torch: _fsdp_collectives.py]"""
    if setting.scenario.precision != GATHERS_FP8:
        return False
    only = any(all(tensor.projection and tensor.role != "expert" for tensor in b.tensors) for b in setting.model.blocks)
    return (plans.zero_stage > 0) & (sharding.shard_group(plans, expert=False) > 1) & only


def _splits_backward(setting: Setting, plans: Plans) -> Mask | bool:
    return _fp8(setting) & (plans.pp > 1) & (setting.scenario.schedule == "zero-bubble")


RULES: tuple[Rule, ...] = (
    Rule(
        id="runtime-fp8-layers",
        severity="refuse",
        scope="runtime",
        source="torchao float8/float8_linear_utils.py at 0.18.0: nn.Linear alone is converted",
        broken=_none,
        sentence=(
            "--precision {precision}: {model} keeps its matrices as [in, out], and torchao converts [out, in] alone: "
            "nothing would be in FP8; use --precision bf16"
        ),
    ),
    Rule(
        id="runtime-fp8-dims",
        severity="refuse",
        scope="runtime",
        source="PyTorch ATen/native/cuda/ScaledBlas.cpp at 2.13.0; torchao leaves such a layer in 16 bits",
        broken=_off_sixteen,
        sentence=_off_sixteen_sentence,
    ),
    Rule(
        id="runtime-fp8-rows",
        severity="refuse",
        scope="runtime",
        source="PyTorch distributed/fsdp/_fully_shard/_fsdp_param.py all_gather_inputs at 2.13.0",
        broken=_uneven_rows,
        sentence=_uneven_rows_sentence,
    ),
    Rule(
        id="runtime-fp8-unit",
        severity="refuse",
        scope="runtime",
        source="PyTorch csrc/distributed/c10d/ProcessGroupGloo.hpp at 2.13.0: no FP8 among the types that gloo sends",
        broken=_all_fp8,
        sentence=(
            "--precision {precision} at --zero {zero_stage}: blocks of {model} have nothing but matrices, so FSDP2 "
            "gathers them as FP8 tensors, which gloo does not send; use --precision fp8-rowwise, or --zero 0"
        ),
    ),
    Rule(
        id="runtime-fp8-zero-bubble",
        severity="refuse",
        scope="runtime",
        source="torchao float8/float8_linear.py at 0.18.0: one backward computes both gradients",
        broken=_splits_backward,
        sentence=(
            "--precision {precision} with --schedule zero-bubble: that schedule asks for the gradients of inputs and "
            "of weights apart, and an FP8 layer computes both each time; use --schedule 1f1b"
        ),
    ),
)
