"""The verbs as functions: the answers of the command line, for a name or for a model that is built."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import trainledger
from command_line import ROOT, answer
from trainledger.errors import BadInput, Refused, UnknownName, UsageError

H100 = ("--gpu", "h100")


def plain(response: object) -> dict[str, Any]:
    return msgspec.json.decode(msgspec.json.encode(response))


def test_a_function_answers_as_the_command_does() -> None:
    found = trainledger.states("llama-3-70b", gpus=64, gpu="h100")
    assert plain(found) == answer("states", "llama-3-70b", "--gpus", "64", *H100)
    held = trainledger.ledger("llama-3-8b", gpus=16, tp=2, zero=1, engine="megatron", offload="optimizer")
    flags = ("--gpus", "16", "--tp", "2", "--zero", "1", "--engine", "megatron", "--offload", "optimizer")
    assert plain(held) == answer("ledger", "llama-3-8b", *flags)
    searched = plain(trainledger.plan("llama-3-8b", gpus=16, gpu="h100", dp_replicate=2))
    asked = answer("plan", "llama-3-8b", "--gpus", "16", *H100, "--dp-replicate", "2")
    assert {**searched, "run": None} == {**asked, "run": None}


def test_a_model_that_is_built_answers_as_its_name_does() -> None:
    model = trainledger.load_model("mixtral-8x7b")
    for verb, flags in (
        (trainledger.states, {}),
        (trainledger.ledger, {"zero": 3}),
        (trainledger.plan, {"gpu": "h100"}),
    ):
        by_name, built = (plain(verb(given, gpus=8, **flags)) for given in ("mixtral-8x7b", model))
        assert {**by_name, "run": None} == {**built, "run": None}


def test_a_config_that_is_handed_over_is_read() -> None:
    config = {"model_type": "gpt2", "_name_or_path": "mine", "n_layer": 3}
    found = trainledger.states(config, gpus=8)
    assert (found.model, found.total_params) == ("mine", trainledger.load_model("gpt2").total_params - 9 * 7_087_872)
    assert trainledger.ledger({"model_type": "gpt2"}, gpus=8).model == "config"
    with pytest.raises(BadInput, match=r"^mine: n_layer is 0"):
        trainledger.states({**config, "n_layer": 0}, gpus=8)
    with pytest.raises(UsageError, match="set would not change a Model"):
        trainledger.states(config, gpus=8, set=["n_layer=4"])


def test_a_module_that_is_built_has_states() -> None:
    shapes = {"embed.weight": (96, 32), "layers.0.up.weight": (64, 32), "layers.1.up.weight": (64, 32)}

    class Module:
        def named_parameters(self) -> Iterator[tuple[str, Any]]:
            yield from ((name, SimpleNamespace(shape=shape)) for name, shape in shapes.items())

    model = trainledger.from_module(Module())
    rows = trainledger.states(model, gpus=4).rows
    assert [row.total_bytes for row in rows] == [16 * 7168, 4 * 7168 + 3 * 7168, 2 * 7168 + 14 * 1792, 16 * 1792]


def test_a_plan_file_and_a_config_stand_where_the_name_does() -> None:
    assert trainledger.ledger(str(ROOT / "examples/llama-3-70b-64xh100.toml")).plan.tp == 8
    config = ROOT / "src/trainledger/data/models/llama-3-8b.json"
    assert trainledger.states(str(config)).total_params == 8_030_261_248


@pytest.mark.parametrize(
    ("error", "flags", "message"),
    [
        (UnknownName, {"gpux": 8}, r"'gpux' is not a known flag of ledger\(\); nearest: .*gpus"),
        (UnknownName, {"sweep": "gpus=1..8"}, r"'sweep' is not a known flag of ledger\(\)"),
        (BadInput, {"gpus": "8"}, r"ledger\(\): gpus is '8': expected `int`, got `str`"),
        (BadInput, {"gpus": 8.5}, r"ledger\(\): gpus is 8.5: expected `int`, got `float`"),
        (Refused, {"recompute": "some"}, r"\[engine-recompute\] --recompute some is not something paper does"),
        (BadInput, {"offload": "cpu"}, r"ledger\(\): offload: 'cpu' is not one of optimizer, parameters"),
        (BadInput, {"pp_layout": (2, 2.5)}, r"ledger\(\): pp-layout is \(2, 2.5\): expected `int`, got `float`"),
        (BadInput, {"tp": 0}, r"--tp is 0: it must lie between 1 and"),
        (UsageError, {"gpus": 12, "tp": 8}, "not a multiple of tp x pp x cp"),
        (Refused, {"gpus": 12, "tp": 12}, r"\[heads-divisible-by-tp\] tp=12"),
    ],
)
def test_what_is_wrong_with_the_arguments_is_said(error: type[Exception], flags: dict[str, Any], message: str) -> None:
    with pytest.raises(error, match=message):
        trainledger.ledger("llama-3-8b", **flags)


def test_a_built_model_is_not_changed_by_flags_of_a_config() -> None:
    model = trainledger.load_model("gpt2")
    with pytest.raises(UsageError, match=r"states\(\): set, layers would not change a Model"):
        trainledger.states(model, set=("n_layer=2",), layers=2)


def test_a_model_that_is_no_model_is_refused() -> None:
    with pytest.raises(BadInput, match=r"plan\(\): model is 70: expected `str`, got `int`"):
        trainledger.plan(70, gpus=8, gpu="h100")  # pyright: ignore[reportArgumentType]
