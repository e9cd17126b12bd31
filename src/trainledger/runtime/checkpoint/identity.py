"""What a checkpoint is of: two models are the same where their tensors and their forward pass are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from trainledger.facts.model import Model
from trainledger.runtime.checkpoint.manifest import Manifest
from trainledger.runtime.model.read import read_semantics
from trainledger.runtime.spec import Optimizer

_NAMELESS = ("name", "source", "notes", "max_positions", "params_only", "unaccounted")
"""What a Model is called, and how long a sequence it is meant for, is no difference between checkpoints."""

_ADAMW = ("exp_avg", "exp_avg_sq", "step")
STATES: Mapping[Optimizer, tuple[str, ...]] = {
    "adamw": _ADAMW,
    "adamw-fused": _ADAMW,
    "adamw-8bit": _ADAMW,
    "adamw-fp8": _ADAMW,
    "sgd": (),
    "sgd-momentum": ("momentum_buffer",),
}
"""What each optimizer keeps of a parameter once it has stepped, as `states_of` says of one that is there."""


def model_digest(model: Model, config: Mapping[str, Any]) -> str:
    """Hash of the tensors of a model and of the rules of its forward pass, whatever it is called."""
    facts: dict[str, Any] = msgspec.to_builtins(model)
    facts = {key: value for key, value in facts.items() if key not in _NAMELESS}
    rules = msgspec.to_builtins(read_semantics(model, config))
    return hashlib.sha256(msgspec.json.encode([facts, rules], order="sorted")).hexdigest()


def other_keys(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Where two config.json differ, at most four keys of them; those that begin with _ say nothing of a model.

    >>> other_keys({"rope_theta": 1e4, "a": 1}, {"rope_theta": 5e5, "a": 1})
    'rope_theta is 10000.0 there and 500000.0 here'
    """
    differing = [key for key in sorted({*found, *wanted}) if found.get(key) != wanted.get(key) and key[:1] != "_"]
    told = [f"{key} is {found.get(key)!r} there and {wanted.get(key)!r} here" for key in differing[:4]]
    return "; ".join([*told, f"and {len(differing) - 4} more keys"] if len(differing) > 4 else told)


def other_states(where: Path, manifest: Manifest, optimizer: str, states: tuple[str, ...]) -> str:
    """Why an optimizer that keeps these states cannot go on with those of a checkpoint, or ""."""
    if manifest.states == states or not (manifest.step or manifest.states):
        return ""
    there, here = (", ".join(kept) or "nothing" for kept in (manifest.states, states))
    return (
        f"{where}: {manifest.optimizer} keeps {there} of a parameter and {optimizer} {here}; "
        "resume with the optimizer that saved it"
    )
