"""A decoder, or the part of one that a pipeline stage holds, built from the ledger's own facts.Model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainledger.errors import Refused
from trainledger.facts.model import Model
from trainledger.facts.model import Tensor as Fact
from trainledger.facts.semantics import Semantics
from trainledger.runtime.model.block import Block
from trainledger.runtime.model.context import Context, make_context
from trainledger.runtime.model.norms import Norm
from trainledger.runtime.model.read import SPREAD, read_semantics, read_spread
from trainledger.runtime.model.tree import Leaf, graft, leaves


class Decoder(nn.Module):
    """Layers of a model with what comes before the first and after the last.

    Parameters have the names of the Hugging Face state dict, layers their index in the whole model; the matrices of
    routed experts are stacked, under a name with `*` for the index. There are no buffers.

    facts       the whole model as the ledger counts it
    blocks      the layers here, by index as text
    entry       modules before the first block (empty: not here); `embedding` is the token table among them
    final       modules after the last block (empty: not here); the output layer is the last of them
    length      tokens of the whole sequence, where a rank has a part of them; None: as many as there are positions
    spread      standard deviation that matrices and tables start with
    """

    def __init__(self, model: Model, semantics: Semantics, layers: Sequence[int], *, first: bool, last: bool) -> None:
        super().__init__()
        self.spread = SPREAD
        self.facts = model
        self.semantics = semantics
        self.first, self.last = first, last
        self.length: int | None = None
        self._paths = {layer: model.layer_prefix.format(i=layer).rstrip(".") for layer in layers}
        self._final: list[str] = []
        if first:
            graft(self, leaves(model.embedding, semantics), {})
        kinds = {layer: block for block in model.blocks for layer in block.layers}
        for layer in layers:
            graft(self, {self._paths[layer]: Block(layer, kinds[layer], semantics)}, {})
        if last:
            self._finish(model)

    def _finish(self, model: Model) -> None:
        rule, facts = self.semantics.exit, model.final
        head, bias = rule.head, False
        if model.tied:
            facts = tuple(fact for fact in model.final if fact.name != f"{head}.bias")
            bias = len(facts) < len(model.final)
            head = head if self.first else self.semantics.entry.tokens
        if bias and not self.first:
            raise Refused(
                "tied-head-bias",
                f"{model.name} ties an output layer that has a bias, which is not cut over pipeline stages; "
                "set tie_word_embeddings=false, or pp=1",
            )
        made: dict[str, Leaf] = leaves(facts, self.semantics)
        if rule.norm and rule.norm not in made:
            made = {rule.norm: Norm(self.semantics.norm, None), **made}
        if model.tied:
            table = _fact(model.embedding, self.semantics.entry.tokens)
            made[head] = nn.Linear(table.shape[1], table.shape[0], bias=bias)
        graft(self, made, {})
        if model.tied and self.first:
            self._linear(head).weight = self._table().weight
        self._final = [name for name in (rule.norm, rule.project, head) if name]

    def _linear(self, path: str) -> nn.Linear:
        return self.get_submodule(path)  # pyright: ignore[reportReturnType]  # grafted as one

    def _table(self) -> nn.Embedding:
        return self.get_submodule(self.semantics.entry.tokens)  # pyright: ignore[reportReturnType]  # grafted as one

    @property
    def embedding(self) -> nn.Module | None:
        """The token table; None on a stage that is not the first."""
        return self._table() if self.first else None

    @property
    def entry(self) -> list[nn.Module]:
        """Token table, learned positions, projection and norm: those that the family has and this stage holds."""
        rule = self.semantics.entry
        paths = (rule.tokens, rule.positions, rule.project, rule.norm)
        return [self.get_submodule(path) for path in paths if path] if self.first else []

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """The layers here, by index as text; a wrapper put in the place of a block is given back as it is."""
        return {str(layer): self.get_submodule(path) for layer, path in self._paths.items()}

    @property
    def block_paths(self) -> dict[int, str]:
        """Where each layer stands in this module, for whoever replaces it."""
        return dict(self._paths)

    @property
    def final(self) -> list[nn.Module]:
        """Norm, projection and output layer: those that the family has and this stage holds."""
        return [self.get_submodule(path) for path in self._final]

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Token ids [B, S] on a first stage, else hidden states [B, S, H], to hidden states, or to logits on a last.

        positions  of the tokens here, [S]; None: 0, 1, ... for as many as the input has
        """
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        hidden = self._enter(x, positions) if self.first else x
        context = self.context(positions, hidden.dtype)
        for block in self.blocks.values():
            hidden = block(hidden, context)
        return self._leave(hidden) if self.last else hidden

    def context(self, positions: Tensor, dtype: torch.dtype) -> Context:
        """What the blocks here share in one pass over these positions [S]."""
        length = positions.shape[0] if self.length is None else self.length
        rules = [self.semantics.attention[layer] for layer in self._paths]
        return make_context(positions, length, dtype, self.semantics.rotary, rules)

    def _enter(self, tokens: Tensor, positions: Tensor) -> Tensor:
        rule = self.semantics.entry
        hidden = self._table()(tokens)
        if rule.rounded:
            hidden = hidden * torch.tensor(rule.multiplier, dtype=hidden.dtype, device=hidden.device)
        elif rule.multiplier != 1.0:
            hidden = hidden * rule.multiplier
        if rule.project:
            hidden = self.get_submodule(rule.project)(hidden)
        if rule.positions:
            hidden = hidden + self.get_submodule(rule.positions)(positions + rule.first_row)
        return self.get_submodule(rule.norm)(hidden) if rule.norm else hidden

    def _leave(self, hidden: Tensor) -> Tensor:
        rule = self.semantics.exit
        for module in self.final:
            hidden = module(hidden)
        if rule.multiplier != 1.0:
            hidden = hidden * rule.multiplier
        return hidden if rule.softcap is None else (hidden / rule.softcap).tanh() * rule.softcap


def _fact(facts: Iterable[Fact], path: str) -> Fact:
    for fact in facts:
        if fact.name == f"{path}.weight":
            return fact
    raise AssertionError(f"no tensor {path}.weight")


def build_decoder(
    model: Model,
    config: Mapping[str, Any],
    *,
    layers: Sequence[int] | None = None,
    first: bool = True,
    last: bool = True,
) -> Decoder:
    """The decoder of a Model on the default device and dtype, its values not set: then `init_weights`, or load them.

    config  the config.json that the Model was read from
    layers  those of one pipeline stage; None: all
    """
    chosen = range(model.num_layers) if layers is None else layers
    outside = [layer for layer in chosen if not 0 <= layer < model.num_layers]
    if outside:
        raise AssertionError(f"layers {outside} are not among the {model.num_layers} of {model.name}")
    made = Decoder(model, read_semantics(model, config), tuple(chosen), first=first, last=last)
    made.spread = read_spread(model, config)
    return made
