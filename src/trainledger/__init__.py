"""Predict what training a large model holds, moves and computes, as a ledger of exact and modelled lines.

Names are loaded when they are first asked for: `import trainledger` costs nothing, and no name here needs torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainledger.account.rules_of_thumb import zero_mem
    from trainledger.errors import TrainledgerError
    from trainledger.facts.by_hand import from_module
    from trainledger.facts.model import Model
    from trainledger.facts.model_load import load_model
    from trainledger.lines import Line
    from trainledger.service.api import ledger, plan, states

__version__ = "0.1.0"

__all__ = [
    "Line",
    "Model",
    "TrainledgerError",
    "__version__",
    "from_module",
    "ledger",
    "load_model",
    "plan",
    "states",
    "zero_mem",
]

_HOME = {
    "Line": "trainledger.lines",
    "Model": "trainledger.facts.model",
    "TrainledgerError": "trainledger.errors",
    "from_module": "trainledger.facts.by_hand",
    "ledger": "trainledger.service.api",
    "load_model": "trainledger.facts.model_load",
    "plan": "trainledger.service.api",
    "states": "trainledger.service.api",
    "zero_mem": "trainledger.account.rules_of_thumb",
}


def __getattr__(name: str) -> object:
    """The public name, from the module that defines it."""
    if name not in _HOME:
        raise AttributeError(f"module 'trainledger' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
