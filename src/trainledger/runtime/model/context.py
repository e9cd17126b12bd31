"""What all blocks of one forward pass share: rotary tables, masks, positions."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from trainledger.facts.semantics import AttentionRule, RotaryRule
from trainledger.runtime.model.rotary import Table, table

Span = tuple[int, bool]
"""A window and whether it is a chunk."""


class Context:
    """Computed once per forward pass and handed to every block; nothing in it needs a gradient.

    positions   [S]
    tables      rotary tables by name
    interleaved which features of a head turn together, by table
    masks       [S, S], True where a query sees a key; only for windows shorter than the sequence
    alibi       what is added to the scores, [heads, S, S], minus infinity where a query sees no key; None: nothing
    """

    alibi: Tensor | None = None

    def __init__(
        self, positions: Tensor, tables: dict[str, Table], interleaved: dict[str, bool], masks: dict[Span, Tensor]
    ) -> None:
        self.positions = positions
        self.tables = tables
        self.interleaved = interleaved
        self.masks = masks

    def mask(self, rule: AttentionRule) -> Tensor | None:
        """The mask of a layer; None: every key up to the query's own."""
        return None if rule.window is None else self.masks.get((rule.window, rule.chunked))

    def causal(self) -> Tensor:
        """True where the key does not come after the query, [S, S]."""
        return self.positions[:, None] >= self.positions[None, :]


def make_context(
    positions: Tensor, length: int, dtype: torch.dtype, rotary: dict[str, RotaryRule], rules: Iterable[AttentionRule]
) -> Context:
    """Tables and masks of these layers for these positions; `length` is one more than the largest position."""
    used = tuple(rules)
    names = {rule.rotary for rule in used if rule.rotary is not None}
    tables = {name: table(rotary[name], positions, length, dtype) for name in sorted(names)}
    spans = {(rule.window, rule.chunked) for rule in used if rule.window is not None and rule.window < length}
    masks = {span: _mask(positions, *span) for span in sorted(spans)}
    made = Context(positions, tables, {name: rotary[name].interleaved for name in names}, masks)
    made.alibi = next((_alibi(positions, rule, dtype) for rule in used if rule.alibi), None)
    return made


def slopes(heads: int) -> list[float]:
    """ALiBi's slope of each head. [transformers 5.24.0: models/bloom/modeling_bloom.py build_alibi_tensor]

    >>> slopes(4)
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    whole = 2 ** (heads.bit_length() - 1)
    regular = [2 ** (-8 * (index + 1) / whole) for index in range(whole)]
    between = [2 ** (-4 * (2 * index + 1) / whole) for index in range(heads - whole)]
    return regular + between


def _alibi(positions: Tensor, rule: AttentionRule, dtype: torch.dtype) -> Tensor:
    slope = torch.tensor(slopes(rule.heads), device=positions.device)[:, None, None] * rule.alibi
    distance = positions[None, :] - positions[:, None]
    return (slope * distance).masked_fill(distance > 0, float("-inf")).to(dtype)


def _mask(positions: Tensor, window: int, chunked: bool) -> Tensor:
    query, key = positions[:, None], positions[None, :]
    near = query // window == key // window if chunked else query - key < window
    return (query >= key) & near
