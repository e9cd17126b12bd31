"""Softmax attention over projected heads: PyTorch's fused kernels, and plain arithmetic where none fits."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Attend(Protocol):
    """q [B, H, S, D], k and v [B, KV, S, D] to [B, H, S, D]; without a mask, causal."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend."""
        ...


def scored(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention with capped scores or sinks [H], which no fused kernel has: the scores are kept, [B, H, S, S].

    mask  [S, S], True where a query sees a key. Query heads of one KV head are rows of one product, so that k and v are
    not repeated.
    """
    batch, heads, length, width = q.shape
    grouped = (batch, k.shape[1], heads // k.shape[1], length)
    scores = (q.reshape(batch, k.shape[1], -1, width) @ k.transpose(-2, -1)).view(*grouped, -1) * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        extra = sinks.view(1, grouped[1], grouped[2], 1, 1).expand(*grouped, 1)
        scores = torch.cat((scores, extra), dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype)[..., : k.shape[2]]
    return (weights.flatten(2, 3) @ v).view(batch, heads, length, -1)


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, scale: float) -> Tensor:
    """PyTorch's kernel. A mask rules flash out on CUDA, but not on CPU."""
    grouped = q.shape[1] != k.shape[1]
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
