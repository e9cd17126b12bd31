"""Rotary positions: frequencies, tables of cosine and sine, and turning q and k by them.

Every formula is that of transformers 5.24.0 (modeling_rope_utils.py), in fp32 as there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainledger.facts.semantics import RotaryRule, Scaling

Table = tuple[Tensor, Tensor]
"""Cosine and sine, [S, dim] each."""


def frequencies(rule: RotaryRule, length: int, device: torch.device) -> Tensor:
    """Radians per position of each pair of features, [dim / 2]; `length` is the number of positions in use."""
    steps = torch.arange(0, rule.dim, 2, device=device, dtype=torch.float32) / rule.dim
    scaling = rule.scaling
    if scaling is None:
        return 1.0 / rule.theta**steps
    if scaling.kind == "linear":
        return 1.0 / rule.theta**steps / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(1.0 / rule.theta**steps, scaling)
    if scaling.kind == "yarn":
        return _yarn(rule, scaling, steps)
    chosen = scaling.long if length > scaling.original else scaling.short
    return 1.0 / (torch.tensor(chosen, device=device, dtype=torch.float32) * rule.theta**steps)


def _llama3(plain: Tensor, scaling: Scaling) -> Tensor:
    """Long waves are stretched by the factor, short ones left, those between mixed."""
    wave = 2 * math.pi / plain
    mix = (scaling.original / wave - scaling.low) / (scaling.high - scaling.low)
    between = (1 - mix) * plain / scaling.factor + mix * plain
    stretched = torch.where(wave > scaling.original / scaling.low, plain / scaling.factor, between)
    return torch.where(wave < scaling.original / scaling.high, plain, stretched)


def _yarn(rule: RotaryRule, scaling: Scaling, steps: Tensor) -> Tensor:
    """A ramp over the features from the plain frequencies to those divided by the factor."""

    def feature(turns: float) -> float:
        """Which feature makes so many turns over the positions of pre-training."""
        return rule.dim * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(rule.theta))

    start, end = feature(scaling.high), feature(scaling.low)
    if scaling.truncate:
        start, end = math.floor(start), math.ceil(end)
    start, end = max(start, 0), min(end, rule.dim - 1)
    if start == end:
        end += 0.001  # the ramp of transformers, which must not divide by zero
    ramp = (torch.arange(rule.dim // 2, device=steps.device, dtype=torch.float32) - start) / (end - start)
    plain = 1.0 / rule.theta**steps
    kept = 1 - ramp.clamp(0, 1)
    return plain / scaling.factor * (1 - kept) + plain * kept


def table(rule: RotaryRule, positions: Tensor, length: int, dtype: torch.dtype) -> Table:
    """Cosine and sine of every position, [S, dim], computed in fp32 and given in `dtype` unless they stay so."""
    dtype = torch.float32 if rule.fp32 else dtype
    angles = positions.to(torch.float32)[:, None] * frequencies(rule, length, positions.device)
    angles = angles.repeat_interleave(2, dim=-1) if rule.interleaved else torch.cat((angles, angles), dim=-1)
    return (angles.cos() * rule.amplitude).to(dtype), (angles.sin() * rule.amplitude).to(dtype)


def rotate(x: Tensor, turn: Table, *, interleaved: bool) -> Tensor:
    """Turn the first features of each head [B, H, S, D]; those beyond the table's width pass."""
    cos, sin = turn
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((rotate(x[..., :width], turn, interleaved=interleaved), x[..., width:]), dim=-1)
    if interleaved:
        partner = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    else:
        partner = torch.cat((-x[..., width // 2 :], x[..., : width // 2]), dim=-1)
    return (x * cos + partner * sin).to(x.dtype)
