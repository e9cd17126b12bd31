"""Models that come with the package: one config.json each, and the other names that people call them.

Each file of `data/models/` keeps the keys of a published config that decide shapes, with `_source` saying where they
were read; its `index.toml` has the other names.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from trainledger.errors import UnknownName
from trainledger.facts.families import model_from_config
from trainledger.facts.load import DATA, load_toml
from trainledger.facts.model import Model

FOLDER = DATA / "models"


@functools.cache
def other_names() -> dict[str, tuple[str, ...]]:
    """Preset -> what else it is called, in lower case: releases with the same shapes, and ids on the Hub."""
    return {preset: tuple(map(str.lower, others)) for preset, others in load_toml(FOLDER / "index.toml").items()}


@functools.cache
def aliases() -> dict[str, str]:
    """Every other name -> its preset."""
    return {other: preset for preset, others in other_names().items() for other in others}


@functools.cache
def preset_names() -> tuple[str, ...]:
    """Names of the models that come with the package, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def find_preset(name: str) -> str | None:
    """The preset that a name or an alias means, in any case; None when there is none.

    >>> find_preset("meta-llama/Meta-Llama-3-8B")
    'llama-3-8b'
    """
    wanted = aliases().get(name.lower(), name.lower())
    return wanted if wanted in preset_names() else None


def preset_config(name: str) -> dict[str, Any]:
    """The config of a preset, by its name or an alias."""
    found = find_preset(name)
    if found is None:
        raise UnknownName("preset model", name, (*preset_names(), *aliases()), listed="trainledger list models")
    return json.loads((FOLDER / f"{found}.json").read_text(encoding="utf-8"))


def preset_source(config: dict[str, Any], name: str) -> str:
    """Where the shapes of a preset come from."""
    return f"preset {name}: {config['_source']}"


def load_preset(name: str) -> Model:
    """The model that comes with the package under this name or alias.

    >>> load_preset("llama-3-8b").total_params
    8030261248
    """
    config = preset_config(name)
    found = find_preset(name) or name
    return model_from_config(config, name=found, source=preset_source(config, found))
