"""DeepSeek's multi-head latent attention (MLA)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trainledger.facts.semantics import AttentionRule
from trainledger.runtime.model.attention import Attention
from trainledger.runtime.model.context import Context


class LatentAttention(Attention):
    """DeepSeek's MLA: q, k and v through low ranks, one rotary key for all heads."""

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        """[B, S, H] to [B, S, H]. v is padded to the width of q and k, which fused kernels want, and cut again."""
        rule = self.rule
        q_pass, q_turn = self._query(hidden).transpose(1, 2).split((rule.nope, rule.rope), dim=-1)
        latent = self.get_submodule("kv_a_proj_with_mqa")(hidden)
        latent, k_turn = latent.split((latent.shape[-1] - rule.rope, rule.rope), dim=-1)
        latent = self.get_submodule("kv_b_proj")(self.get_submodule("kv_a_layernorm")(latent))
        k_pass, v = (
            latent.unflatten(-1, (-1, rule.nope + rule.value)).transpose(1, 2).split((rule.nope, rule.value), dim=-1)
        )
        q_turn, k_turn = self.position(q_turn, k_turn.unsqueeze(1), context)
        q = torch.cat((q_pass, q_turn), dim=-1)
        k = torch.cat((k_pass, k_turn.expand(-1, k_pass.shape[1], -1, -1)), dim=-1)
        wide = q.shape[-1] - rule.value
        if wide < 0:
            k, q = functional.pad(k, (0, -wide)), functional.pad(q, (0, -wide))
        mixed = self.mix(q, k, functional.pad(v, (0, wide)) if wide > 0 else v, context)
        return self.finish(mixed[..., : rule.value])

    def _query(self, hidden: Tensor) -> Tensor:
        """Q [B, S, heads, nope + rope]."""
        rule = self.rule
        if rule.q == "q_proj":
            q = self.get_submodule("q_proj")(hidden)
        else:
            latent = self.get_submodule("q_a_layernorm")(self.get_submodule("q_a_proj")(hidden))
            q = self.get_submodule("q_b_proj")(latent)
        return q.unflatten(-1, (-1, rule.head_dim))


def make_attention(rule: AttentionRule) -> Attention:
    """The module of a rule."""
    return LatentAttention(rule) if rule.kind == "mla" else Attention(rule)
