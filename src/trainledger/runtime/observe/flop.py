"""The arithmetic of a rank, by kind of operation.

A multiply-add is 2 FLOP. Attention is counted in full, causal or not: each query with each key, of as many heads as
the query has; its backward is five products, since the kernels compute the scores again. Only products are counted,
as the operations that are called: what a recomputation repeats counts again, and ring attention counts block by block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from trainledger.runtime.observe.dispatch import After

aten = torch.ops.aten

_WORDS = {
    "mm": "matmul",
    "addmm": "matmul",
    "bmm": "matmul",
    "baddbmm": "matmul",
    "_scaled_mm": "matmul",
    "_grouped_mm": "grouped_matmul",
    "_scaled_grouped_mm": "grouped_matmul",
}


def grouped_flop(left: torch.Tensor, right: torch.Tensor, *_args: object, **_kwargs: object) -> int:
    """FLOP of a grouped product, whose groups together make up the rows, the columns or the inner dimension.

    left [M, K] and right [G, K, N]: rows are parted; [G, M, K] and [K, N]: columns; [M, K] and [K, N]: the inner
    dimension; each is M K N products. Only [G, M, K] and [G, K, N] are G of those. [torch: aten/src/ATen/native/
    GroupedMMUtils.h]
    """
    both = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return 2 * both * left.shape[-2] * left.shape[-1] * right.shape[-1]


def product_flop(left: torch.Tensor, right: torch.Tensor, *_args: object, **_kwargs: object) -> int:
    """FLOP of [M, K] times [K, N], or of a batch of them."""
    return 2 * left.numel() * right.shape[-1]


def added_product_flop(
    _sum: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *_args: object, **_kwargs: object
) -> int:
    """FLOP of a product that is added to something; the addition is not counted."""
    return product_flop(left, right)


def attention_flop(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_args: object, **_kwargs: object
) -> int:
    """FLOP of the two products of attention."""
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def attention_backward_flop(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_args: object, **_kwargs: object
) -> int:
    """FLOP of the five products of the backward of attention."""
    return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


_ATTENTIONS = ("flash_attention", "efficient_attention", "cudnn_attention")

FORMULAS: dict[OpOverloadPacket, Callable[..., int]] = {
    **flop_registry,
    aten.mm: product_flop,
    aten.bmm: product_flop,
    aten.addmm: added_product_flop,
    aten.baddbmm: added_product_flop,
    aten._grouped_mm: grouped_flop,
    aten._scaled_grouped_mm: grouped_flop,
    aten._scaled_dot_product_flash_attention_for_cpu: attention_flop,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flop,
    **{getattr(aten, f"_scaled_dot_product_{name}"): attention_flop for name in _ATTENTIONS},
    **{getattr(aten, f"_scaled_dot_product_{name}_backward"): attention_backward_flop for name in _ATTENTIONS},
}
"""PyTorch's formulas, and those it lacks: the CPU's attention, and products of groups, which it counts as nothing.

Those that a step calls often are written anew, with the same result: PyTorch's walk through all arguments for shapes,
which takes longer than all else that watches an operation.
"""


def word_of(name: str) -> str:
    """The kind of an operation that has a formula; one of another kind keeps its name.

    >>> word_of("addmm"), word_of("_scaled_dot_product_flash_attention_for_cpu_backward")
    ('matmul', 'attention_backward')
    """
    if "attention" in name:
        return "attention_backward" if name.endswith("backward") else "attention_forward"
    return _WORDS.get(name, name)


class FlopCounter:
    """A watcher that adds up FLOP by kind: matmul, grouped_matmul, attention_forward, attention_backward."""

    def __init__(self) -> None:
        self.flop: dict[str, int] = {}

    def after(self, func: OpOverload) -> After | None:
        """Count `func`, if it has a formula; an attention without one is refused, for it would count as nothing."""
        name = func.overloadpacket.__name__
        formula = FORMULAS.get(func.overloadpacket)
        if formula is None:
            assert "attention" not in name, f"{func.name()} has no formula in observe/flop.py: add it"
            return None
        word = word_of(name)

        def count(args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
            self.flop[word] = self.flop.get(word, 0) + formula(*args, **kwargs, out_val=out)

        return count
