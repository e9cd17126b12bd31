"""Feed-forward networks of two or three matrices, and their activations."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from trainledger.facts.semantics import MlpRule

_TANH = functools.partial(functional.gelu, approximate="tanh")


def _quick(x: Tensor) -> Tensor:
    return x * (1.702 * x).sigmoid()  # the slope of transformers' QuickGELUActivation


def _relu2(x: Tensor) -> Tensor:
    return functional.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": _TANH,
    "gelu_fast": _TANH,
    "gelu_pytorch_tanh": _TANH,
    "quick_gelu": _quick,
    "relu": functional.relu,
    "relu2": _relu2,
}
"""By their names in a config.json. [transformers 5.24.0: activations.py] The three tanh spellings are one function."""


class Mlp(nn.Module):
    """A network below a block; its matrices are grafted by the block."""

    def __init__(self, rule: MlpRule) -> None:
        super().__init__()
        self.rule = rule

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H]."""
        return network(self, self.rule, x)


def network(owner: nn.Module, rule: MlpRule, x: Tensor) -> Tensor:
    """The network whose matrices `owner` holds: [..., H] to [..., H]."""
    act, up = ACTIVATIONS[rule.activation], owner.get_submodule(rule.up)(x)
    if rule.kind == "gated":
        up = act(owner.get_submodule(rule.gate)(x)) * up
    elif rule.kind == "fused":
        gate, up = up.chunk(2, dim=-1)
        up = act(gate) * up
    else:
        up = act(up)
    return owner.get_submodule(rule.down)(up)
