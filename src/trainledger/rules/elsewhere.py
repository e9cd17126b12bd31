"""Refusals by name that no plan alone decides: of a config, of files of tokens, of the machine.

Whoever reads the config, opens the files or knows the machine says them; here they have their place among the rules.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Elsewhere(msgspec.Struct, frozen=True):
    """One of them.

    about     what decides it, beside the plan
    refuses   what is refused, for a page
    source    the module that says it
    """

    id: str
    about: Literal["config", "data", "machine"]
    refuses: str
    source: str


ELSEWHERE: tuple[Elsewhere, ...] = (
    Elsewhere("runtime-family", "config", "a family whose forward pass is not written", "runtime/model/read.py"),
    Elsewhere(
        "runtime-config",
        "config",
        "a key or a value that has shapes and no forward pass that is known",
        "runtime/model/read.py",
    ),
    Elsewhere("data-vocabulary", "data", "tokens of more words than the model has rows for", "runtime/data/check.py"),
    Elsewhere("data-tokenizer", "data", "token files of another tokenizer than the run's", "runtime/data/check.py"),
    Elsewhere("data-length", "data", "fewer sequences than one step takes", "runtime/data/check.py"),
    Elsewhere(
        "data-held-out", "data", "held-out tokens that are trained on, or too few of them", "runtime/data/check.py"
    ),
    Elsewhere(
        "runtime-host-memory", "machine", "ranks that do not fit into the machine's memory", "runtime/launch/memory.py"
    ),
)
