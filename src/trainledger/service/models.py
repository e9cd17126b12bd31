"""Which model a request means: a name, a file, a count or sizes given by hand."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from trainledger.errors import BadInput, UsageError
from trainledger.facts.by_hand import config_by_hand, model_by_hand, model_from_count
from trainledger.facts.families import model_from_config
from trainledger.facts.model import Model
from trainledger.facts.model_load import load_model, load_with_config
from trainledger.service.requests import ModelRequest

SIZES = ("hidden", "layers", "heads", "ffn", "vocab")
"""What a model by hand needs; kv_heads may be left out."""

_COUNT = re.compile(r"([0-9]{1,40}(?:\.[0-9]{1,40})?(?:[eE]\+?[0-9]{1,2})?)([KMBT]?)", re.IGNORECASE | re.ASCII)
_POWERS = {"": 0, "K": 3, "M": 6, "B": 9, "T": 12}


def parameter_count(text: str) -> int | None:
    """The number that a bare count means; None where the text is something else.

    >>> parameter_count("70B"), parameter_count("7.5e9"), parameter_count("llama-3-8b")
    (70000000000, 7500000000, None)
    """
    match = _COUNT.fullmatch(text)
    if match is None:
        return None
    count = Decimal(match[1]).scaleb(_POWERS[match[2].upper()])
    if count != count.to_integral_value():
        raise BadInput(f"{text} is not a whole number of parameters; write one such as 70B, 7.5e9 or 124439808")
    return int(count)


def find_model(request: ModelRequest) -> Model:
    """The model of a request whose PLAN file has been laid under it."""
    name = _named(request)
    if name is None:
        return model_by_hand(**_sizes(request))
    count = parameter_count(name)
    if count is None:
        return load_model(name, overrides=overrides(request))
    if request.set:
        raise UsageError(f"--set changes keys of a config and {name} is a parameter count; leave --set out")
    return model_from_count(count)


def find_config(request: ModelRequest) -> tuple[dict[str, Any], Model]:
    """The config and the model of a request: what a run needs. A count has no shapes that could be run."""
    name = _named(request)
    if name is None:
        sizes = _sizes(request)
        by_hand = model_by_hand(**sizes)
        config = config_by_hand(**sizes)
        return config, model_from_config(config, name=by_hand.name, source=by_hand.source)
    if parameter_count(name) is not None:
        raise BadInput(
            f"{name} is a parameter count without shapes, and only shapes can be run; name a model "
            "(`trainledger list models`), give a config.json, or sizes: --hidden --layers --heads --ffn --vocab"
        )
    return load_with_config(name, overrides=overrides(request))


def _given(request: ModelRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in (*SIZES, "kv_heads") if getattr(request, name) is not None}


def _named(request: ModelRequest) -> str | None:
    """The name that a request gives its model; None where it gives sizes."""
    name, sizes = request.model, _given(request)
    if name is None or name == "custom":
        return None
    if sizes:
        flags = ", ".join(_flag(size) for size in sizes)
        raise UsageError(f"{flags} would not change {name}; use --set KEY=VALUE, or custom in place of {name}")
    return name


def _sizes(request: ModelRequest) -> dict[str, Any]:
    """The sizes of a model by hand: all that it needs, and nothing of a config."""
    sizes = _given(request)
    if not sizes:
        raise UsageError(
            "no model: name one (`trainledger list models`), give a config.json or a parameter count such as 70B, or "
            "sizes: --hidden --layers --heads --ffn --vocab"
        )
    lacking = [_flag(name) for name in SIZES if name not in sizes]
    if lacking:
        raise UsageError(f"a custom model needs {' '.join(lacking)} as well; add {'them' if lacking[1:] else 'it'}")
    if request.set:
        raise UsageError("--set changes keys of a config and a custom model has none; leave --set out")
    return sizes


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def overrides(request: ModelRequest) -> dict[str, str]:
    """KEY=VALUE pairs of --set."""
    pairs: dict[str, str] = {}
    for text in request.set or ():
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {text}: write KEY=VALUE, such as --set num_hidden_layers=40")
        if key in pairs:
            raise UsageError(f"--set gives {key} twice, as {pairs[key]} and as {value}; give it once")
        pairs[key] = value
    return pairs
