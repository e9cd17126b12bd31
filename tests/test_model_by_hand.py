"""Models without a config: from sizes, from a count, from a module."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from trainledger.errors import BadInput
from trainledger.facts.by_hand import from_module, model_by_hand, model_from_count
from trainledger.facts.presets import load_preset


def test_a_model_by_hand_is_the_llama_of_the_same_sizes() -> None:
    by_hand = model_by_hand(hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256)
    llama = load_preset("llama-3-8b")
    assert (by_hand.embedding, by_hand.blocks, by_hand.final) == (llama.embedding, llama.blocks, llama.final)
    plain = model_by_hand(hidden=64, layers=2, heads=4, ffn=96, vocab=128, tied=True, gated=False)
    assert plain.total_params == 128 * 64 + 2 * (4 * 64 * 64 + 2 * 64 * 96 + 2 * 64) + 64
    for wrong in ({"hidden": 0}, {"heads": 3}, {"kv_heads": 3}, {"layers": 10**9}, {"ffn": -1}, {"vocab": 1.5}):
        with pytest.raises(BadInput, match=next(iter(wrong))):
            model_by_hand(**{"hidden": 64, "layers": 2, "heads": 4, "ffn": 96, "vocab": 128, **wrong})  # type: ignore[arg-type]


def test_a_count_alone_is_a_model_for_states() -> None:
    model = model_from_count(7_500_000_000)
    assert model.total_params == 7_500_000_000
    assert model.params_only
    assert not model.blocks
    for wrong in (0, -1, 10**30, 2**57):
        with pytest.raises(BadInput):
            model_from_count(wrong)


class FakeModule:
    """What from_module reads of a torch module."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def named_parameters(self) -> list[tuple[str, SimpleNamespace]]:
        return [(name, SimpleNamespace(shape=shape)) for name, shape in self.shapes.items()]


def test_a_module_becomes_blocks_of_equal_layers() -> None:
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (10, 4), "vision.0.proj.weight": (2, 2)}
    for layer in range(3):
        shapes[f"model.layers.{layer}.mlp.experts.0.weight"] = (4, 8 if layer == 0 else 6)
        shapes[f"model.layers.{layer}.norm.weight"] = (4,)
    shapes["head.weight"] = (10, 4)
    model = from_module(FakeModule(shapes))
    assert model.total_params == sum(math.prod(shape) for shape in shapes.values())
    assert model.layer_prefix == "model.layers.{i}."
    assert [block.layers for block in model.blocks] == [(0,), (1, 2)]
    assert model.blocks[0].tensors[0].name == "mlp.experts.0.weight"
    assert [tensor.name for tensor in model.final] == ["head.weight"]
    assert model.params_only
    assert from_module(FakeModule({"w": ()})).total_params == 1
    for wrong in (FakeModule({}), object()):
        with pytest.raises(BadInput):
            from_module(wrong)  # type: ignore[arg-type]
