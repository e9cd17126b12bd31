"""A decoder small enough to count by hand, for tests of what watches a run."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD, FFN, SEQ, BATCH = 96, 32, 4, 2, 8, 80, 16, 2
"""Fewer key heads than query heads, and no two products of one shape."""


class Block(nn.Module):
    """Attention with fewer key heads than query heads, and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.query = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.key = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False)
        self.value = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False)
        self.out = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, FFN, bias=False)
        self.up = nn.Linear(WIDTH, FFN, bias=False)
        self.down = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        query, key, value = (
            projection(normed).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(-2))
        return hidden + self.down(functional.silu(self.gate(hidden)) * self.up(hidden))


class Tiny(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, layers: int = 2, *, recompute: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            if self.recompute:
                hidden = checkpoint(block, hidden, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = block(hidden)
        return self.head(hidden)


def tokens(batch: int = BATCH) -> torch.Tensor:
    return torch.arange(batch * SEQ).view(batch, SEQ) % VOCABULARY


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
