"""What one layer's casts to FP8 clamp and flush, and which of its products run in FP8, as torchao does them.

torchao has no hook at its casts, and afterwards nothing shows: e4m3 has no infinity, a cast clamps to 448, and under a
scale that was taken from the largest element that element is the largest code anyway. So what is cast is looked at
under its scale, before it is clamped. What a layer is called travels with each of its operands in the tuple of settings
that torchao hands from the layer to the cast and on to the product. [torchao 0.18.0: float8/float8_linear.py,
float8_scaling_utils.py, fsdp_utils.py, float8_ops.py]
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._ops import OpOverload
from torchao.float8 import (  # pyright: ignore[reportMissingTypeStubs]  # it has none
    float8_ops,
    float8_scaling_utils,
    fsdp_utils,
)
from torchao.float8.float8_training_tensor import (  # pyright: ignore[reportMissingTypeStubs]
    GemmInputRole,
    LinearMMConfig,
)

from trainledger.runtime.precision.emulate import emulated
from trainledger.runtime.spec import OPERANDS

_MM = torch.ops.aten.mm.default
_torchao_cast = float8_scaling_utils.hp_tensor_and_scale_to_float8
_torchao_product = float8_ops.FLOAT8_OPS_TABLE[_MM]


class Tally:
    """Of one layer on one rank, since `clear`.

    counting   whether casts are counted, which reads every operand once more
    counts     int64 [operands, 3]: elements that were cast, those saturated, those flushed; None: nothing was counted
    gemms      products that ran in FP8, and their FLOP; counted always
    stale      a planted fault: what scales of an operand are multiplied by
    """

    def __init__(self) -> None:
        self.counting = False
        self.counts: torch.Tensor | None = None
        self.gemms = 0
        self.flop = 0
        self.stale: dict[str, float] = {}

    def clear(self) -> None:
        """Begin anew."""
        self.counts = None

    def add(self, operand: str, given: torch.Tensor, scale: torch.Tensor, codes: torch.Tensor) -> None:
        """Count one cast of `given`, which times `scale` became `codes`."""
        scaled = given.detach().float() * scale
        # what is not a number has no code either
        within = (scaled.abs() <= most(codes.dtype)).sum()
        zeros = ((codes.view(torch.uint8) & 0x7F) == 0).sum() - (scaled == 0).sum()
        total = torch.full_like(within, given.numel())
        if self.counts is None:
            self.counts = torch.zeros(len(OPERANDS), 3, dtype=torch.int64, device=given.device)
        self.counts[OPERANDS.index(operand)] += torch.stack([total, total - within, zeros])


def most(dtype: torch.dtype) -> float:
    """The largest magnitude that rounding alone brings back to the largest code: beyond it an element is saturated.

    >>> most(torch.float8_e4m3fn), most(torch.float8_e5m2)
    (464.0, 61440.0)
    """
    info = torch.finfo(dtype)
    step = 2.0 ** math.floor(math.log2(info.max)) * info.eps
    return info.max + step / 2


class Counted(LinearMMConfig):
    """torchao's settings of a layer's products, and the layer's tally."""

    tally: Tally


def counted(settings: LinearMMConfig, tally: Tally) -> Counted:
    """The same settings with a tally."""
    made = Counted(*settings)
    made.tally = tally
    return made


@torch.no_grad()
def _cast(
    hp_tensor: torch.Tensor,
    s: torch.Tensor,
    float8_dtype: torch.dtype,
    linear_mm_config: LinearMMConfig | None = None,
    gemm_input_role: GemmInputRole = GemmInputRole.INPUT,
    axiswise_dim: int | None = None,
) -> Any:  # noqa: ANN401  # torchao's tensor, which it has no type for
    """Cast as torchao does, under the names that it gives its arguments."""
    operand = gemm_input_role.value
    tally = linear_mm_config.tally if isinstance(linear_mm_config, Counted) else None
    if tally is not None and operand in tally.stale:
        s = s * tally.stale[operand]
    made = _torchao_cast(hp_tensor, s, float8_dtype, linear_mm_config, gemm_input_role, axiswise_dim)
    if tally is not None and tally.counting:
        tally.add(operand, hp_tensor, s, made._data)
    return made


def _product(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> object:
    """Multiply two FP8 tensors as torchao does, or on the CPU as `emulate` does."""
    left, right = args[:2]
    settings = left._linear_mm_config
    if isinstance(settings, Counted):
        settings.tally.gemms += 1
        settings.tally.flop += 2 * left.shape[0] * left.shape[1] * right.shape[1]
    if left._data.device.type == "cpu":
        return emulated(left, right)
    return _torchao_product(op, args, kwargs)


def install() -> None:
    """Put both in the place of torchao's, for good: layers without a tally are not touched."""
    float8_scaling_utils.hp_tensor_and_scale_to_float8 = _cast
    fsdp_utils.hp_tensor_and_scale_to_float8 = _cast
    float8_ops.FLOAT8_OPS_TABLE[_MM] = _product
