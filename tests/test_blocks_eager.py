"""The eager manner: what each operation keeps, worked out by hand from ATen's derivatives, on one layer of a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trainledger.facts.semantics import MlpRule, NormRule, RotaryRule
from trainledger.inventory.blocks.eager import Eager
from trainledger.inventory.blocks.eager.network import activated, network
from trainledger.inventory.blocks.eager.norm import norm
from trainledger.inventory.blocks.eager.ops import Ops, Sheet
from trainledger.inventory.blocks.eager.rotary import rotated
from trainledger.inventory.blocks.sizes import Sizes
from trainledger.inventory.inventory import Inventory
from trainledger.inventory.tape import Program, Tape, walk
from trainledger.plans.plan import make_plans
from trainledger.runtime.model.read import read_semantics
from trainledger.service.prove import _as_told
from trainledger.service.prove_plan import planned
from trainledger.service.prove_request import Request

ROWS = np.array([6, 10])
"""Of two plans at once."""


class Sketch:
    """A few operations on x [ROWS, width], and their tape."""

    def __init__(self, width: int, dtype: str = "bf16") -> None:
        self.program = Program()
        self.ops = Ops(self.program, dtype)
        self.x = self.ops.input("x", ROWS, width)

    def tape(self, result: Sheet) -> Tape:
        return walk(self.program, result.value, anew=True)

    def kept(self, result: Sheet) -> list[float]:
        """Bytes that wait for the backward, by row of x, in each plan."""
        return [float(one) for one in self.tape(result).saved / ROWS]


@pytest.mark.parametrize(
    ("rule", "dtype", "each_row", "once"),
    [
        # x in fp32, the inverse root, the normed x before its weight
        (NormRule(kind="rms"), "bf16", 4 * 8 + 4 + 4 * 8, 0),
        # x itself, which is not copied
        (NormRule(kind="rms"), "fp32", 4 * 8 + 4 + 4 * 8, 0),
        # and a weight that is computed
        (NormRule(kind="rms", plus_one=True), "fp32", 4 * 8 + 4 + 4 * 8, 8 * 4),
        # x, mean, reciprocal deviation
        (NormRule(kind="layer"), "bf16", 2 * 8 + 2 + 2, 0),
    ],
)
def test_a_norm_keeps_what_its_operations_keep(rule: NormRule, dtype: str, each_row: int, once: int) -> None:
    sketch = Sketch(8, dtype)
    found = sketch.tape(norm(sketch.ops, "norm", rule, sketch.x, weight=True))
    assert found.saved.tolist() == (each_row * ROWS + once).tolist()


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        # x; gate, up, the activation of gate, the product
        (MlpRule(), 2 * 4 + 4 * 2 * 16),
        # gate and up are views of one result
        (MlpRule(kind="fused"), 2 * 4 + 4 * 2 * 16),
        # the activation keeps what it is given
        (MlpRule(kind="plain", activation="gelu"), 2 * 4 + 2 * 2 * 16),
        # and here what it gives, which is the next matrix' input too
        (MlpRule(kind="plain", activation="relu"), 2 * 4 + 1 * 2 * 16),
        (MlpRule(kind="plain", activation="relu2"), 2 * 4 + 2 * 2 * 16),
        # x, its sigmoid, the product
        (MlpRule(kind="plain", activation="quick_gelu"), 2 * 4 + 3 * 2 * 16),
    ],
)
def test_a_network_keeps_what_each_matrix_and_each_product_is_given(rule: MlpRule, kept: int) -> None:
    sketch = Sketch(4)
    assert sketch.kept(network(sketch.ops, rule, sketch.x, 16, 4, biases=frozenset())) == [kept, kept]


def test_an_activation_that_keeps_its_result_lets_go_of_its_input() -> None:
    sketch = Sketch(4)
    made = sketch.ops.linear("up", sketch.x, 16)
    assert sketch.kept(activated(sketch.ops, "relu", made, "relu")) == [2 * (4 + 16)] * 2


@pytest.mark.parametrize(("dim", "fp32"), [(8, False), (4, False), (8, True)])
def test_turning_keeps_no_more_than_the_tables_which_are_counted_once_for_all_layers(dim: int, fp32: bool) -> None:
    sketch = Sketch(8)
    turned = rotated(sketch.ops, "q turned", sketch.x, RotaryRule(dim=dim, theta=1e4, fp32=fp32))
    assert (turned.dtype, turned.width) == ("bf16", 8)
    assert sketch.kept(turned) == [0, 0]


def test_a_square_needs_two_tensors_more_backward() -> None:
    sketch = Sketch(4)
    tape = sketch.tape(sketch.ops.square("square", sketch.x))
    # x, the gradient of the result, x ** 1, twice that; then the gradient of x besides
    assert (tape.peak("backward")[0] / ROWS).tolist() == [5 * 2 * 4] * 2


def eager(plan: dict[str, Any], model: str = "llama-3-8b", **flags: Any) -> Eager[Tape]:  # noqa: ANN401 - of a Request
    """The manner for plans of one small model."""
    asked = planned(Request(model=model, **flags))
    setting = Inventory(_as_told(asked)).setting
    return Eager(Sizes(setting, make_plans(plan)), read_semantics(asked.spec.model, asked.spec.config), walk)


def layer(made: Eager[Tape]) -> Tape:
    return made.layer(made.model.blocks[0], 0)


def test_many_plans_are_as_each_alone() -> None:
    together = layer(eager({"mbs": np.array([1, 2, 3])}))
    assert [int(layer(eager({"mbs": mbs})).saved[0]) for mbs in (1, 2, 3)] == together.saved.tolist()


def test_tensor_parallel_ranks_divide_what_they_compute_and_with_sequences_all_that_is_kept() -> None:
    alone, cut, sequences = (layer(eager(plan)) for plan in ({}, {"tp": 2, "sp": 0}, {"tp": 2, "sp": 1}))
    assert int(alone.saved[0]) / 2 < int(cut.saved[0]) < int(alone.saved[0])
    # the gathered inputs of attention and network are whole on each
    gathered = 2 * 4 * 32 * 64
    assert int(sequences.saved[0]) == (int(alone.saved[0]) + gathered) // 2


def test_a_recomputed_layer_keeps_its_input_alone() -> None:
    found = layer(eager({}, recompute="full"))
    assert found.saved.tolist() == [4 * 32 * 64]
    assert found.peak("backward")[0] > layer(eager({})).saved


def test_layers_that_are_alike_are_walked_once() -> None:
    made = eager({})
    (block,) = made.model.blocks
    assert made.layer(block, 0) is made.layer(block, 1)


def test_a_loss_keeps_log_probabilities_in_fp32() -> None:
    made = eager({})
    rows, vocab = 32, made.model.vocab_size
    assert made.loss().saved.tolist() == [4 * rows * vocab]
