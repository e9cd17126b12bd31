"""What a checkpoint is of: two models are the same where their tensors and their forward pass are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from trainledger.facts.model import Model
from trainledger.runtime.model.read import read_semantics

_NAMELESS = ("name", "source", "notes", "max_positions", "params_only")
"""What a Model is called, and how long a sequence it is meant for, is no difference between checkpoints."""


def model_digest(model: Model, config: Mapping[str, Any]) -> str:
    """Hash of the tensors of a model and of the rules of its forward pass, whatever it is called."""
    facts: dict[str, Any] = msgspec.to_builtins(model)
    facts = {key: value for key, value in facts.items() if key not in _NAMELESS}
    rules = msgspec.to_builtins(read_semantics(model, config))
    return hashlib.sha256(msgspec.json.encode([facts, rules], order="sorted")).hexdigest()


def other_keys(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Where two config.json differ, at most four keys of them.

    >>> other_keys({"rope_theta": 1e4, "a": 1}, {"rope_theta": 5e5, "a": 1})
    'rope_theta is 10000.0 there and 500000.0 here'
    """
    differing = [key for key in sorted({*found, *wanted}) if found.get(key) != wanted.get(key)]
    told = [f"{key} is {found.get(key)!r} there and {wanted.get(key)!r} here" for key in differing[:4]]
    return "; ".join([*told, f"and {len(differing) - 4} more keys"] if len(differing) > 4 else told)
