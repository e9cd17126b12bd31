"""Softmax attention over projected heads: PyTorch's fused kernels, and plain arithmetic where none fits."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.nn import functional


class Attend(Protocol):
    """q [B, H, S, D], k and v [B, KV, S, D] to [B, H, S, D]; without a mask, causal."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend."""
        ...


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, scale: float) -> Tensor:
    """PyTorch's kernel. A mask rules out flash on CUDA (memory-efficient or math remain); on CPU flash takes masks."""
    grouped = q.shape[1] != k.shape[1]
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
