"""Typed access to a config.json that remembers which keys were asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from trainledger.errors import BadInput
from trainledger.runtime.model.mlp import ACTIVATIONS


class Config:
    """A config as the rules of a forward pass are read from it; `seen` are the keys that some reader understood."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where = where
        self.values = values
        self.seen: set[str] = set()

    def get(self, key: str, default: object = None) -> object:
        """The value of a key, or the default of transformers where it is missing or null."""
        self.seen.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def entries(self, key: str) -> dict[str, Any]:
        """An object, empty where the key is missing."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.refuse(key, value, "an object")
        return dict(cast("Mapping[str, Any]", value))

    def ignore(self, *keys: str) -> None:
        """Keys that change nothing in this family's forward pass, or that its classes do not read."""
        self.seen.update(keys)

    def maybe(self, key: str) -> float | None:
        """A number, or None where the key is missing or null."""
        return None if self.get(key) is None else self.number(key, 0.0)

    def number(self, key: str, default: float) -> float:
        """A number that may be an integer in the file."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.refuse(key, value, "a number")
        return float(value)

    def whole(self, key: str, default: int) -> int:
        """An integer."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(key, value, "a whole number")
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, value, "true or false")
        return value

    def word(self, key: str, default: str, allowed: tuple[str, ...]) -> str:
        """One of some words."""
        value = self.get(key, default)
        if value not in allowed:
            raise self.refuse(key, value, " or ".join(allowed))
        return str(value)

    def activation(self, default: str, *keys: str) -> str:
        """The name of the activation, under the first of these keys that is there."""
        found = default
        for key in reversed(keys):
            found = self.get(key, found)
        if found not in ACTIVATIONS:
            raise self.refuse(keys[0], found, f"one of {', '.join(ACTIVATIONS)}")
        return str(found)

    def refuse(self, key: str, value: object, rule: str) -> BadInput:
        """An error about the value of a key."""
        return BadInput(f"{self.where}: {key} is {value!r}; the runtime takes {rule} here; --set {key}=VALUE")
