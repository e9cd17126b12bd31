"""Which experts a token visits, and with which weight. No auxiliary loss, no noise: ties go to the lower index."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainledger.facts.semantics import MoeRule


def route(rule: MoeRule, gate: nn.Module, rows: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows [T, H] to weights [T, k] in the dtype of the rows and chosen experts [T, k].

    correction  added to the scores by which a sigmoid router chooses, not to the weights; None: zero
    """
    scores: Tensor = gate(rows)
    if rule.router in ("softmax_top", "sigmoid_top"):
        weights, chosen = scores.topk(rule.top_k, dim=-1)
        weights = weights.softmax(dim=-1) if rule.router == "softmax_top" else weights.float().sigmoid()
        return weights.to(rows.dtype), chosen
    scores = scores.float().softmax(dim=-1) if rule.router == "softmax" else scores.float().sigmoid()
    eligible = scores.detach() if correction is None else scores.detach() + correction
    if rule.groups > 1:
        eligible = _within_groups(rule, eligible)
    chosen = eligible.topk(rule.top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if rule.renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + rule.floor)
    return (weights * rule.scaling).to(rows.dtype), chosen


def _within_groups(rule: MoeRule, scores: Tensor) -> Tensor:
    """Scores [T, experts] with minus infinity outside the best groups of each token."""
    grouped = scores.unflatten(-1, (rule.groups, -1))
    best = grouped.topk(2, dim=-1).values.sum(dim=-1) if rule.group_of_two else grouped.amax(dim=-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, best.topk(rule.top_groups, dim=-1).indices, value=True)
    return grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
