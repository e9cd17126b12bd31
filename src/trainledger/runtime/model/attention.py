"""Softmax attention with grouped heads, driven by an AttentionRule."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainledger.facts.semantics import AttentionRule
from trainledger.runtime.model.attend import Attend, fused, scored
from trainledger.runtime.model.context import Context
from trainledger.runtime.model.rotary import rotate


class Attention(nn.Module):
    """Projections, norms, positions, `attend`, output projection; its children are grafted by the block.

    attend      q [B, H, S, D], k and v [B, KV, S, D] (and a mask, where the layer needs one) to [B, H, S, D]; context
                parallelism replaces it, and must refuse a layer that is not `plain_up_to` its sequence
    first_head  which of the model's heads is the first here; tensor parallelism sets it where ALiBi is used
    """

    def __init__(self, rule: AttentionRule) -> None:
        super().__init__()
        self.rule = rule
        self.first_head = 0
        self.attend: Attend = functools.partial(fused, scale=rule.scale)

    def plain_up_to(self, length: int) -> bool:
        """Whether causal attention over all keys is everything that this layer does in sequences of this length.

        A window that holds them all forbids nothing.
        """
        rule = self.rule
        open_window = rule.window is None or length <= rule.window
        return open_window and rule.softcap is None and not rule.sinks and not rule.alibi

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        """[B, S, H] to [B, S, H]."""
        q, k, v = (part.transpose(1, 2) for part in self.project(hidden))
        q, k = self.position(q, k, context)
        return self.finish(self.mix(q, k, v, context))

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Q [B, S, heads, D], k and v [B, S, KV heads, D]; how many heads is what the matrices here say."""
        rule = self.rule
        if rule.qkv == "separate":
            q, k, v = (self.get_submodule(name)(hidden) for name in (rule.q, rule.k, rule.v))
            if rule.qk_norm == "wide":
                q, k = self.get_submodule(rule.q_norm)(q), self.get_submodule(rule.k_norm)(k)
            if rule.clip is not None:
                q, k, v = (part.clamp(-rule.clip, rule.clip) for part in (q, k, v))
            q, k, v = (part.unflatten(-1, (-1, rule.head_dim)) for part in (q, k, v))
        else:
            q, k, v = self._split(self.get_submodule(rule.fused)(hidden))
        if rule.qk_norm == "head":
            q, k = self.get_submodule(rule.q_norm)(q), self.get_submodule(rule.k_norm)(k)
        return q, k, v

    def _split(self, together: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rule = self.rule
        heads = together.unflatten(-1, (-1, rule.head_dim))
        if rule.qkv == "rows":
            kv = heads.shape[2] // (rule.group + 2)
            q, k, v = heads.split((kv * rule.group, kv, kv), dim=2)
            return q, k, v
        q, k, v = heads.unflatten(2, (-1, rule.group + 2)).split((rule.group, 1, 1), dim=3)
        return q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)

    def position(self, q: Tensor, k: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Turn q and k [B, H, S, D] by their positions."""
        rule = self.rule
        if rule.rotary is not None:
            turn, interleaved = context.tables[rule.rotary], context.interleaved[rule.rotary]
            q, k = rotate(q, turn, interleaved=interleaved), rotate(k, turn, interleaved=interleaved)
        if rule.qk_norm == "after_rotary":
            q, k = (functional.rms_norm(part, [rule.head_dim], None, rule.after_eps) for part in (q, k))
        if rule.temperature is not None:
            length, strength = rule.temperature
            steps = torch.floor((context.positions.to(torch.float32) + 1) / length)
            q = (q * (1 + strength * torch.log1p(steps))[:, None]).to(q.dtype)
        return q, k

    def mix(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Attention itself."""
        rule, mask = self.rule, context.mask(self.rule)
        if rule.softcap is not None or rule.sinks:
            mask = context.causal() if mask is None else mask
            sinks = self.get_parameter("sinks") if rule.sinks else None
            return scored(q, k, v, mask, scale=rule.scale, softcap=rule.softcap, sinks=sinks)
        if rule.alibi and context.alibi is not None:
            mask = context.alibi[self.first_head : self.first_head + q.shape[1]]
        return self.attend(q, k, v) if mask is None else self.attend(q, k, v, mask)

    def finish(self, mixed: Tensor) -> Tensor:
        """[B, heads, S, D] to [B, S, H]."""
        return self.get_submodule(self.rule.out)(mixed.transpose(1, 2).flatten(2))
