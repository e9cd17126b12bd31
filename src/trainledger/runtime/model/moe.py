"""Routed experts: the router, the grouped matrix products, and the shared network beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainledger.facts.semantics import MoeRule
from trainledger.runtime.model.mlp import ACTIVATIONS
from trainledger.runtime.model.router import route
from trainledger.runtime.model.tree import weight_of


class Dispatch(Protocol):
    """How tokens reach their experts: rows [T, H], weights and chosen experts [T, k] to the weighted sums [T, H]."""

    def __call__(self, experts: Experts, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Dispatch, run, combine."""
        ...


class Experts(nn.Module):
    """The experts that this rank holds, as stacks [experts, ...] that the block grafts.

    `forward` takes rows that are sorted by expert, and how many rows each expert here gets.
    """

    def __init__(self, rule: MoeRule) -> None:
        super().__init__()
        self.rule = rule

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows [N, H] and counts [experts here], which sum to N, to [N, H]. An expert may have no row."""
        ends = counts.cumsum(0).to(torch.int32)
        if self.rule.stacked != "no":
            return self._stacked(rows, counts, ends)
        gate, up, down = (weight_of(self, f"*.{name}.weight").transpose(-2, -1) for name in self.rule.names)
        act = ACTIVATIONS[self.rule.activation]
        inner = act(functional.grouped_mm(rows, gate, offs=ends)) * functional.grouped_mm(rows, up, offs=ends)
        return functional.grouped_mm(inner, down, offs=ends)

    def _stacked(self, rows: Tensor, counts: Tensor, ends: Tensor) -> Tensor:
        """The same from `[experts, in, out]` with gate and up together, and perhaps biases."""
        both = functional.grouped_mm(rows, weight_of(self, "gate_up_proj"), offs=ends)
        both = self._with_bias(both, "gate_up_proj_bias", counts)
        if self.rule.stacked == "interleaved":
            gate, up = both[..., ::2], both[..., 1::2]
        else:
            gate, up = both.chunk(2, dim=-1)
        if self.rule.limit:
            gate, up = gate.clamp(max=self.rule.limit), up.clamp(-self.rule.limit, self.rule.limit)
            inner = (up + 1) * (gate * (gate * self.rule.alpha).sigmoid())
        else:
            inner = ACTIVATIONS[self.rule.activation](gate) * up
        given = functional.grouped_mm(inner, weight_of(self, "down_proj"), offs=ends)
        return self._with_bias(given, "down_proj_bias", counts)

    def _with_bias(self, rows: Tensor, name: str, counts: Tensor) -> Tensor:
        """Rows [N, out] plus the bias of the expert of each row."""
        if name not in self._parameters:
            return rows
        return rows + self.get_parameter(name).repeat_interleave(counts, dim=0, output_size=rows.shape[0])


class Moe(nn.Module):
    """A network of routed experts.

    dispatch  None: all experts are here; expert parallelism sets a function that reaches those of other ranks
    """

    def __init__(self, rule: MoeRule) -> None:
        super().__init__()
        self.rule = rule
        self.dispatch: Dispatch | None = None
        self.correction: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, H] to [B, S, H]."""
        rule = self.rule
        rows = hidden.reshape(-1, hidden.shape[-1])
        weights, chosen = self.route(rows)
        mixed = (self.dispatch or here)(self.get_submodule("experts"), rows, weights, chosen)  # pyright: ignore[reportArgumentType]  # grafted as Experts
        if rule.shared is not None:
            beside = self.get_submodule(rule.shared.path)(rows)
            if rule.shared_gate is not None:
                beside = self.get_submodule(rule.shared_gate)(rows).sigmoid() * beside
            mixed = mixed + beside
        return mixed.view_as(hidden)

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [T, k] in the dtype of the rows and the experts chosen [T, k]."""
        return route(self.rule, self.get_submodule(self.rule.gate), rows, self.correction)


def here(experts: Experts, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Every expert is on this rank. [T, H] to [T, H]."""
    count = next(experts.parameters()).shape[0]
    return visited(experts, count, rows, weights, chosen, scale_input=experts.rule.scale_input)


def visited(
    run: Callable[[Tensor, Tensor], Tensor],
    count: int,
    rows: Tensor,
    weights: Tensor,
    chosen: Tensor,
    *,
    scale_input: bool,
) -> Tensor:
    """Sort the visits to `count` experts by expert, run them, add them up by token. [T, H] to [T, H].

    run  takes the rows of all visits, sorted, and how many each expert gets
    """
    visits = chosen.flatten()
    order = visits.argsort(stable=True)
    tokens = order // chosen.shape[1]
    counts = visits.new_zeros(count).scatter_add(0, visits, torch.ones_like(visits))
    weight = weights.flatten()[order, None]
    given = run(rows[tokens] * weight, counts) if scale_input else run(rows[tokens], counts) * weight
    # scatter_add, not index_add: the latter keeps `given` for its backward, if only to ask for its shape
    return torch.zeros_like(rows).scatter_add(0, tokens[:, None].expand_as(given), given)
