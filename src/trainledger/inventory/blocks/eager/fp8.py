"""What products in FP8 make and drop where no hardware has them: on a CPU codes are decoded, and multiplied in fp32.

A cast goes through fp32: the elements, those times the scale, those clamped, then the codes. A product decodes both
sides, by an index of four bytes an element, multiplies, divides by the scales and rounds. Nothing of it outlives the
operation; what a layer keeps for its backward is what a plain one keeps. [torchao 0.18.0: float8/float8_linear.py,
float8_training_tensor.py, float8_utils.py; trainledger runtime/precision/emulate.py]
"""

from __future__ import annotations

from functools import reduce

import msgspec
import numpy as np

from trainledger.arrays import IntArray
from trainledger.plans.setting import Setting

CAST = 9
"""Bytes an element at the most of a cast: what is scaled and what is clamped, both in fp32, and a code."""
INDEX, WIDE, HALF = 4, 4, 2
"""Bytes of an index into the table of codes, of fp32, of the dtype that is computed in."""


class Emulated(msgspec.Struct, frozen=True):
    """How one recipe multiplies.

    rowwise    scales are those of rows and of columns: their product is a matrix of fp32
    weights    weights are cast for each product, and not before they are gathered
    backward   the products of the backward are in FP8 too
    """

    rowwise: bool
    weights: bool
    backward: bool

    def forward(self, x: IntArray, w: IntArray, y: IntArray) -> IntArray:
        """[plans]: bytes beside the result of y = x w, at the most; each is a number of elements."""
        cast = [CAST * x, *([x + CAST * w] if self.weights else [])]
        codes = x + (w if self.weights else 0)
        return _beyond([*cast, *self._product(codes, x, w, y)], HALF * y)

    def back(self, x: IntArray, w: IntArray, y: IntArray) -> IntArray:
        """[plans]: the same of the gradients of x and of w, which are cast for from that of y twice."""
        if not self.backward:
            return 0 * y
        weights = w if self.weights else 0 * w
        first, second = y + weights, 2 * y + weights + HALF * x
        alive = [
            CAST * y,
            *([y + CAST * w] if self.weights else []),
            *self._product(first, y, w, x),
            first + HALF * x + CAST * y,
            second + CAST * x,
            *self._product(second + x, y, x, w),
        ]
        return _beyond(alive, HALF * (x + w))

    def _product(self, codes: IntArray, left: IntArray, right: IntArray, made: IntArray) -> list[IntArray]:
        """Bytes at each moment of a product, the codes of both sides among them."""
        divided = 3 * WIDE * made if self.rowwise else 2 * WIDE * made + HALF * made
        return [
            codes + (INDEX + WIDE) * left,
            codes + WIDE * left + (INDEX + WIDE) * right,
            codes + WIDE * (left + right + made),
            codes + divided,
        ]


def emulated(setting: Setting) -> Emulated | None:
    """How a Setting's recipe multiplies the matrices of blocks; None where it does so in the dtype of activations."""
    if not setting.recipe.fp8:
        return None
    name = setting.scenario.precision
    return Emulated(
        rowwise=name == "fp8-rowwise", weights=setting.recipe.gathered != "fp8", backward=name != "fp8-forward"
    )


def _beyond(alive: list[IntArray], counted: IntArray) -> IntArray:
    """The most of them, without what is counted where it stays."""
    return np.maximum(reduce(np.maximum, alive) - counted, 0)
