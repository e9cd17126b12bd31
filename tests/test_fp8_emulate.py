"""Emulated products of FP8 codes against torchao's own, and every code against PyTorch's conversion."""

import dataclasses
from typing import Any

import pytest
import torch

from trainledger.runtime.precision.emulate import decoded, emulated
from trainledger.runtime.precision.quiet import quiet_import

CODES = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", CODES)
def test_every_code_stands_for_what_pytorch_says(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).view(16, 16)
    for view in (codes, codes.t(), codes[:, ::2], codes[3:]):
        found = decoded(view)
        assert found.dtype == torch.float32
        assert torch.equal(found.nan_to_num(7.0, 8.0, 9.0), view.float().nan_to_num(7.0, 8.0, 9.0))


def test_a_transposed_matrix_is_decoded_where_it_lies() -> None:
    codes = torch.randn(8, 4).to(torch.float8_e4m3fn)
    assert decoded(codes.t()).stride() == codes.t().stride()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_product_is_that_of_torchao(recipe: str) -> None:
    """To the rounding of bf16: torchao divides each element by its scale first, and here the sums are divided."""
    torchao = quiet_import("torchao.float8")
    ops = quiet_import("torchao.float8.float8_ops")
    mm, products = torch.ops.aten.mm.default, ops.FLOAT8_OPS_TABLE
    config = dataclasses.replace(torchao.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    plain = torch.nn.Sequential(torch.nn.Linear(32, 48, bias=False)).bfloat16()
    layer = torchao.convert_to_float8_training(plain, config=config)
    given = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 32)
    found: list[list[torch.Tensor]] = []
    calls: list[torch.Size] = []

    def ours(op: object, args: tuple[Any, ...], kwargs: object = None) -> torch.Tensor:
        calls.append(args[0].shape)
        return emulated(*args[:2])

    before = products[mm]
    try:
        for product in (ops.float8_mm, ours):
            products[mm] = product
            x = given.bfloat16().requires_grad_()
            layer.zero_grad()
            y = layer(x)
            y.backward(y.detach())
            assert x.grad is not None
            found.append([y.detach(), x.grad, layer[0].weight.grad])
    finally:
        products[mm] = before
    assert calls == [(64, 32), (64, 48), (48, 64)], "forward, gradient of the input, gradient of the weight"
    for wanted, made in zip(*found, strict=True):
        assert wanted.dtype == made.dtype == torch.bfloat16
        assert (wanted - made).float().norm() < 2**-10 * wanted.float().norm()
