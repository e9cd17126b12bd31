"""Small configs of every family that the runtime runs, and decoders built from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from trainledger.facts.families import model_from_config
from trainledger.facts.model import Model
from trainledger.runtime.model import Decoder, build_decoder, init_weights

CASES: dict[str, dict[str, Any]] = {
    case["name"]: case["config"]
    for case in json.loads((Path(__file__).parent / "data" / "model_cases.json").read_text(encoding="utf-8"))
}
"""What scripts/model_oracle.py compares with transformers, by name."""

LENGTH = 24
"""Tokens of a test's sequence: more than every window among the cases, and than the positions of longrope's start."""


@cache
def facts(case: str) -> Model:
    """The model of a case as the ledger sees it."""
    return model_from_config(CASES[case], name=case, source="")


def decoder_of(case: str, *, layers: Sequence[int] | None = None, first: bool = True, last: bool = True) -> Decoder:
    """A decoder of a case, or a stage of one, with every value so large that it matters."""
    made = build_decoder(facts(case), CASES[case], layers=layers, first=first, last=last)
    init_weights(made, 3)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            generator = torch.Generator().manual_seed(len(name) + 31 * sum(name.encode()))
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter.add_(noise * 0.3)
            else:
                parameter.copy_(noise * 0.25)
    return made


def tokens_of(case: str, rows: int = 2, length: int = LENGTH) -> torch.Tensor:
    """Token ids [rows, length], the same on every call."""
    return torch.randint(0, facts(case).vocab_size, (rows, length), generator=torch.Generator().manual_seed(5))
