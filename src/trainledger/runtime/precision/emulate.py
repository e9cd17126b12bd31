"""Products of FP8 codes where no hardware has them: decoded by a table, multiplied in fp32, then divided by the scales.

torchao emulates too, but converts code by code in PyTorch's CPU kernel, which takes five times as long for e4m3 as a
look into a table of 256, and copies both operands into a layout that only a GPU's kernel needs. [torchao 0.18.0:
float8/float8_ops.py float8_mm] Here as on a GPU the codes are multiplied as they are, and the sums are scaled.
"""

from __future__ import annotations

from typing import Any

import torch


def emulated(left: Any, right: Any) -> torch.Tensor:  # noqa: ANN401  # torchao's tensors, which it has no type for
    """Left [M, K] times right [K, N], whose scales are one number each, or [M, 1] and [1, N]; in left's own dtype."""
    summed = torch.mm(decoded(left._data), decoded(right._data))
    return (summed / (left._scale * right._scale)).to(left._orig_dtype)


def decoded(codes: torch.Tensor) -> torch.Tensor:
    """What FP8 codes stand for, fp32 of the same shape; a transposed matrix stays one, and nothing is moved."""
    if codes.dim() == 2 and not codes.is_contiguous() and codes.t().is_contiguous():
        return decoded(codes.t()).t()
    at = codes.contiguous().view(torch.uint8).flatten().int()
    return _values(codes.dtype).index_select(0, at).view(codes.shape)


def _values(dtype: torch.dtype) -> torch.Tensor:
    """Of every code, in order [256]; made anew each time, for a table that stays would be a storage no line claims."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()
