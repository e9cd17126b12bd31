"""Importing torchao, which logs a warning for every library of its own that this machine has no device for."""

from __future__ import annotations

import importlib
import logging
from typing import Any


def quiet_import(name: str) -> Any:  # noqa: ANN401  # torchao has no types
    """A module of torchao, without those words; what goes wrong is still raised."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return importlib.import_module(name)
    finally:
        logging.disable(before)
