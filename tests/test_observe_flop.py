"""FLOP are those of a hand count: of each product once, in the forward, the backward and what is computed again."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from observed_models import (
    BATCH,
    FFN,
    HEAD,
    HEADS,
    KV_HEADS,
    SEQ,
    VOCABULARY,
    WIDTH,
    Block,
    Tiny,
    loss_of,
    tokens,
)
from trainledger.runtime.observe.dispatch import watching
from trainledger.runtime.observe.flop import FORMULAS, FlopCounter

TOKENS = BATCH * SEQ
LINEARS = WIDTH * (2 * HEADS * HEAD + 2 * KV_HEADS * HEAD + 3 * FFN)
"""Elements of a block's matrices."""
SCORES = 2 * BATCH * HEADS * SEQ * SEQ * HEAD
"""FLOP of one of the two products of attention, for the query's heads."""


def flop_of(model: nn.Module, batch: torch.Tensor) -> dict[str, int]:
    counter = FlopCounter()
    with watching(counter):
        loss_of(model, batch).backward()
    return counter.flop


def test_forward_and_backward_of_a_decoder() -> None:
    layers = 3
    assert flop_of(Tiny(layers), tokens()) == {
        "matmul": 3 * 2 * TOKENS * (layers * LINEARS + WIDTH * VOCABULARY),
        "attention_forward": layers * 2 * SCORES,
        "attention_backward": layers * 5 * SCORES,
    }


def test_recomputation_repeats_all_products_of_a_block_but_the_last_that_no_gradient_needs() -> None:
    """Without an early stop the product with `down` would be repeated too. [torch: utils/checkpoint.py, early_stop]"""
    layers = 3
    again = layers * (LINEARS - FFN * WIDTH)
    assert flop_of(Tiny(layers, recompute=True), tokens()) == {
        "matmul": 2 * TOKENS * (3 * (layers * LINEARS + WIDTH * VOCABULARY) + again),
        "attention_forward": layers * 2 * SCORES * 2,
        "attention_backward": layers * 5 * SCORES,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_groups_are_counted_by_their_rows_whatever_a_group_gets(dtype: torch.dtype) -> None:
    rows, width, out = 24, 32, 48
    left = torch.ones(rows, width, dtype=dtype, requires_grad=True)
    right = torch.ones(3, width, out, dtype=dtype, requires_grad=True)
    ends = torch.tensor([16, 16, rows], dtype=torch.int32)
    counter = FlopCounter()
    with watching(counter):
        product = functional.grouped_mm(left, right, offs=ends)
        assert counter.flop == {"grouped_matmul": 2 * rows * width * out}
        product.backward(torch.ones_like(product))
    assert counter.flop == {"grouped_matmul": 3 * 2 * rows * width * out}


def test_a_batch_of_products_is_as_many_products() -> None:
    counter = FlopCounter()
    left, right = torch.ones(5, 8, 16), torch.ones(5, 16, 24)
    with watching(counter):
        torch.bmm(left, right)
        torch.baddbmm(torch.ones(5, 8, 24), left, right)
        torch.addmm(torch.ones(24), left[0], right[0])
        functional.grouped_mm(left, right)
    one = 2 * 8 * 16 * 24
    assert counter.flop == {"matmul": 11 * one, "grouped_matmul": 5 * one}


def test_formulas_written_anew_are_those_of_pytorch() -> None:
    aten = torch.ops.aten
    matrices = torch.ones(8, 16), torch.ones(16, 24)
    batches = torch.ones(5, 8, 16), torch.ones(5, 16, 24)
    query, key, value = torch.ones(2, 6, 5, 8), torch.ones(2, 3, 7, 8), torch.ones(2, 3, 7, 4)
    grad = torch.ones(2, 6, 5, 4)
    for packet, given in (
        (aten.mm, matrices),
        (aten.bmm, batches),
        (aten.addmm, (torch.ones(24), *matrices)),
        (aten.baddbmm, (torch.ones(24), *batches)),
        (aten._scaled_dot_product_flash_attention, (query, key, value, 0.0, True)),
        (aten._scaled_dot_product_efficient_attention_backward, (grad, query, key, value, None)),
    ):
        assert FORMULAS[packet](*given) == flop_registry[packet](*given) > 0


def test_an_attention_without_a_formula_is_refused() -> None:
    with pytest.raises(AssertionError, match="aten::_cudnn_attention_forward has no formula"):
        FlopCounter().after(torch.ops.aten._cudnn_attention_forward.default)
    assert FlopCounter().after(torch.ops.aten.softmax.int) is None


def test_pytorchs_counter_agrees_where_it_has_a_formula_and_misses_the_attention_of_the_cpu() -> None:
    model, hidden = Block(), torch.ones(BATCH, SEQ, WIDTH)
    counter = FlopCounter()
    with watching(counter):
        model(hidden).sum().backward()
    with FlopCounterMode(display=False) as theirs:
        model(hidden).sum().backward()
    assert theirs.get_total_flops() == counter.flop["matmul"]
    assert counter.flop["attention_backward"] == 5 * SCORES
