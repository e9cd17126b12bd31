"""Modules by dotted path: leaves built from the ledger's tensors, grafted into a tree in the ledger's order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from trainledger.facts.model import Tensor as Fact
from trainledger.facts.semantics import NormRule, Semantics
from trainledger.runtime.model.norms import Norm

Leaf = nn.Module | nn.Parameter


class Transposed(nn.Module):
    """A linear layer whose weight is [in, out], as GPT-2's Conv1D keeps it."""

    def __init__(self, shape: tuple[int, ...], *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[1])) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X [..., in] to [..., out]."""
        return nn.functional.linear(x, self.weight.t(), self.bias)


class Gate(nn.Linear):
    """A router's matrix [experts, in]; with `fp32` it multiplies in fp32 whatever the dtype of its input."""

    def __init__(self, shape: tuple[int, ...], *, bias: bool, fp32: bool) -> None:
        super().__init__(shape[1], shape[0], bias=bias)
        self.fp32 = fp32

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # the name that nn.Linear gives it
        """Scores [..., experts]."""
        if not self.fp32:
            return super().forward(input)
        bias = self._parameters["bias"]
        return nn.functional.linear(input.float(), self.weight.float(), None if bias is None else bias.float())


class Stack(nn.Module):
    """The same matrix of every expert: weight [experts, out, in], bias [experts, out]; it has no forward of its own."""

    def __init__(self, copies: int, shape: tuple[int, ...], *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(copies, *shape))
        self.bias = nn.Parameter(torch.empty(copies, shape[0])) if bias else None


def star(name: str) -> str:
    """A name of the ledger with `*` for the index of the expert."""
    return name.replace("{e}", "*")


def leaves(facts: Iterable[Fact], semantics: Semantics) -> dict[str, Leaf]:
    """One module for each weight with its bias, a bare parameter for anything else, by path and in order."""
    held: dict[str, dict[str, Fact]] = {}
    for fact in facts:
        path, _, last = star(fact.name).rpartition(".")
        if last in ("weight", "bias"):
            held.setdefault(path, {})[last] = fact
        else:
            held[star(fact.name)] = {"": fact}
    return {path: _leaf(path, parts, semantics) for path, parts in held.items()}


def _leaf(path: str, parts: Mapping[str, Fact], semantics: Semantics) -> Leaf:
    bias = "bias" in parts
    if "" in parts:
        fact = parts[""]
        return nn.Parameter(torch.empty((fact.copies, *fact.shape) if fact.copies > 1 else fact.shape))
    fact = parts["weight"]
    if fact.role == "norm":
        shape = (fact.copies, *fact.shape) if fact.copies > 1 else fact.shape
        return Norm(_norm_rule(path, semantics), shape, bias=bias)
    if fact.copies > 1:
        return Stack(fact.copies, fact.shape, bias=bias)
    if not fact.linear:
        return nn.Embedding(fact.shape[0], fact.shape[1])
    if fact.role == "router":
        return Gate(fact.shape, bias=bias, fp32=semantics.moe is not None and semantics.moe.fp32)
    if semantics.transposed and fact.role != "head":
        return Transposed(fact.shape, bias=bias)
    return nn.Linear(fact.shape[1], fact.shape[0], bias=bias)


def _norm_rule(path: str, semantics: Semantics) -> NormRule:
    """Norms inside MLA have a rule of their own."""
    inner = path.startswith(f"{semantics.attention[0].path}.")
    return semantics.latent_norm if inner and semantics.latent_norm is not None else semantics.norm


def graft(root: nn.Module, parts: Mapping[str, Leaf], containers: Mapping[str, nn.Module]) -> None:
    """Register leaves below `root` in order; a module on the way is the one given for its path, or a plain one."""
    for path, leaf in parts.items():
        at, walked = root, ""
        *way, last = path.split(".")
        for name in way:
            walked = f"{walked}.{name}" if walked else name
            if name not in at._modules:  # pyright: ignore[reportPrivateUsage]  # names such as "*" have no accessor
                at.add_module(name, containers.get(walked) or nn.Module())
            at = at.get_submodule(name)
        if isinstance(leaf, nn.Parameter):
            at.register_parameter(last, leaf)
        else:
            at.add_module(last, leaf)


def weight_of(module: nn.Module, name: str) -> torch.Tensor:
    """The parameter at a dotted name below a module."""
    path, _, last = name.rpartition(".")
    found = getattr(module.get_submodule(path), last)
    assert isinstance(found, torch.Tensor), f"{name} is no parameter"
    return found
