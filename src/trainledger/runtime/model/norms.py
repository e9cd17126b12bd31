"""Normalisation over the last dimension, with or without parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainledger.facts.semantics import NormRule


class Norm(nn.Module):
    """An RMSNorm or LayerNorm [..., width]; without `shape` it has no weight.

    PyTorch's kernels reduce in fp32 whatever the dtype of the input. A weight with more than one dimension ([heads,
    head_dim]: Cohere, StableLM) is a weight of its own for each head.
    """

    def __init__(self, rule: NormRule, shape: tuple[int, ...] | None, *, bias: bool = False) -> None:
        super().__init__()
        self.rule = rule
        self.weight = None if shape is None else nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape)) if shape is not None and bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        weight = self.weight
        if weight is not None and self.rule.plus_one:
            weight = 1 + weight
        if weight is not None and weight.dim() > 1:
            return self._plain(x, None) * weight
        return self._plain(x, weight)

    def _plain(self, x: Tensor, weight: Tensor | None) -> Tensor:
        width = [x.shape[-1]]
        if self.rule.kind == "rms":
            return functional.rms_norm(x, width, weight, self.rule.eps)
        return functional.layer_norm(x, width, weight, self.bias, self.rule.eps)
