"""Products of real matrices on a device, in bf16 and in FP8: seconds, FLOP per second, share of the card's peak.

FP8 operands are cast as torchao's recipes cast the input and the weight of a layer, and multiplied by torch._scaled_mm
with their scales, as torchao calls it. `product` is that call alone; `with casts` casts both operands each time, in
PyTorch's own operations one by one. [torchao 0.18.0: float8/float8_linear.py, float8_ops.py addmm_float8_unwrapped]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cards.here import accelerator_here, forget, in_turns
from cards.record import Row, several
from cards.sizes import Sizes
from trainledger.errors import MissingFact
from trainledger.facts.cluster import Accelerator
from trainledger.facts.model import Model
from trainledger.profiles import load_profile
from trainledger.runtime.precision.quiet import quiet_import
from trainledger.runtime.precision.share import convertible
from trainledger.service.models import find_config
from trainledger.service.prove_request import Request

RECIPES: dict[str, str] = {"fp8-tensorwise": "tensorwise", "fp8-rowwise": "rowwise"}
"""Recipes of the program by torchao's name of them."""
# private, and what torchao calls
SCALED_MM: Callable[..., Tensor] = torch._scaled_mm  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


class Shape(NamedTuple):
    """Rows times a matrix [columns, inner]: what layers have it."""

    layers: str
    rows: int
    inner: int
    columns: int

    @property
    def flop(self) -> int:
        """A multiply-add is two."""
        return 2 * self.rows * self.inner * self.columns

    @property
    def words(self) -> str:
        """As ids have it."""
        return f"{self.layers} {self.rows}x{self.inner}x{self.columns}"


def shapes(model: Model, rows: int) -> list[Shape]:
    """The matrices of a model's first block, each size once."""
    named: dict[tuple[int, ...], list[str]] = {}
    for tensor in convertible(model.blocks[0]):
        named.setdefault(tensor.shape, []).append(tensor.name.removesuffix(".weight").rpartition(".")[2])
    # from dense blocks only, whose matrices have an output and an input side
    return [Shape("+".join(names), rows, shape[1], shape[0]) for shape, names in named.items() if len(shape) == 2]


class Fp8Product:
    """One product as a recipe of torchao has it in the forward of a layer."""

    def __init__(self, recipe: str, given: Tensor, weight: Tensor) -> None:
        self._scaling = quiet_import("torchao.float8.float8_scaling_utils")
        settings = quiet_import("torchao.float8").Float8LinearConfig.from_recipe_name(RECIPES[recipe])
        training = quiet_import("torchao.float8.float8_training_tensor")
        self._settings = settings
        self._no_mm = training.LinearMMConfig()
        self._given, self._weight = given, weight
        self._left, self._right = self._cast()

    def _cast(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """(codes, what the product is multiplied by) of the input [rows, inner] and of the weight [inner, columns]."""
        settings = self._settings
        left = self._one(self._given, settings.cast_config_input, -1)
        right = self._one(self._weight.t(), settings.cast_config_weight, 0)
        return left, right

    def _one(self, tensor: Tensor, cast: Any, dim: int) -> tuple[Tensor, Tensor]:  # noqa: ANN401  # torchao's
        made = self._scaling.hp_tensor_to_float8_dynamic(
            tensor,
            cast.target_dtype,
            self._no_mm,
            scaling_granularity=cast.scaling_granularity,
            axiswise_dim=self._scaling.get_maybe_axiswise_dim(dim, cast.scaling_granularity),
            round_scales_to_power_of_2=self._settings.round_scales_to_power_of_2,
        )
        return made._data, made._scale.reciprocal()  # noqa: SLF001  # private: the codes have no other name

    def product(self) -> Tensor:
        """The call alone."""
        return self._multiply(self._left, self._right)

    def with_casts(self) -> Tensor:
        """Both casts and the call."""
        return self._multiply(*self._cast())

    def _multiply(self, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Tensor:
        fast = self._settings.gemm_config_output.use_fast_accum
        return SCALED_MM(
            left[0],
            right[0],
            scale_a=left[1],
            scale_b=right[1],
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )


def rows_of(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """The rows of all shapes: of each product its seconds, FLOP per second and share of the peak."""
    _, model = find_config(Request(model=sizes.gemm_model, set=sizes.gemm_set or None))
    card = accelerator_here(device)
    for shape in shapes(model, sizes.gemm_rows):
        forget(device)
        found = in_turns(calls(shape, device), device, sizes.pairs, sizes.least_s)
        for name, times in found.items():
            yield from _rows(f"gemm/{sizes.gemm_model}/{shape.words}/{name}", shape, times, _peak(card, name))


def calls(shape: Shape, device: torch.device) -> dict[str, Callable[[], object]]:
    """The ways to multiply, on the same numbers; no FP8 where the card has none."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=device, dtype=torch.bfloat16, generator=generator)

    given, weight = drawn(shape.rows, shape.inner), drawn(shape.columns, shape.inner) / shape.inner**0.5
    made: dict[str, Callable[[], object]] = {"bf16/product": lambda: torch.mm(given, weight.t())}
    for recipe in RECIPES:
        if device.type != "cuda" or torch.cuda.get_device_capability(device) >= _least(recipe):
            one = Fp8Product(recipe, given, weight)
            made[f"{recipe}/product"] = one.product
            made[f"{recipe}/with casts"] = one.with_casts
    return made


def _least(recipe: str) -> tuple[int, ...]:
    """The CUDA compute capability from which a recipe runs."""
    return tuple(map(int, load_profile("pytorch").precision[recipe].least_capability.split(".")))


def _peak(card: Accelerator | None, name: str) -> tuple[float | None, str]:
    """The card's peak rate in the dtype that a product has, or why none is known."""
    if card is None:
        return None, "no file of data/accelerators is about this device"
    dtype = name.partition("/")[0].partition("-")[0]
    try:
        return card.peak_flop_per_s(dtype), f"of {card.name}'s {dtype} peak"
    except MissingFact as error:
        return None, str(error)


def _rows(name: str, shape: Shape, seconds: Sequence[float], peak: tuple[float | None, str]) -> Iterator[Row]:
    rate, note = peak
    yield several(f"{name}/seconds", "s", seconds)
    yield several(f"{name}/rate", "FLOP/s", [shape.flop / each for each in seconds], note="" if rate else note)
    if rate is not None:
        yield several(f"{name}/share", "of peak", [shape.flop / each / rate for each in seconds], note=note)
