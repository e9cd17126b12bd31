"""What `train` answers of runs that did not happen: JSON keys, screens, exit codes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from command_line import check_golden
from train_files import config
from trainledger.reconcile.verdict import Verdict
from trainledger.report import machine
from trainledger.report.plain import render
from trainledger.report.train import document
from trainledger.runtime.precision.share import share_of
from trainledger.runtime.progress import Progress
from trainledger.runtime.train.result import Layer, Trained, Written
from trainledger.runtime.train.spec import TrainSpec
from trainledger.service import train
from trainledger.service.prove_launch import How
from trainledger.service.train_request import Request

LINES = (
    Verdict(
        id="held/weights/model.embed_tokens.weight",
        rank=0,
        predicted=4096,
        measured=4096,
        unit="B",
        basis="exact",
        verdict="equal",
        instant="rest",
    ),
    Verdict(
        id="moved/all_gather/uint8:calls@dp_shard",
        rank=1,
        predicted=4,
        measured=8,
        unit="calls",
        basis="exact",
        verdict="differs",
    ),
    Verdict(id="done/matmul", rank=0, predicted=9, measured=9, unit="FLOP", basis="exact", verdict="equal"),
)
LAYER = "model.layers.1.mlp.down_proj"

VARIANTS: dict[str, dict[str, Any]] = {
    "train.txt": {},
    "train_fp8.txt": {
        "ran": 168,
        "lost": (Layer(layer=LAYER, operand="input", saturated=0.02, flushed=0.3),),
        "fallen": (LAYER,),
        "said": tuple(f"{LAYER}: casts of its input to FP8 saturated 2.000%, number {n}" for n in range(12)),
    },
    "train_stopped.txt": {
        "how": "stopped",
        "checkpoints": tuple(Written(step=step, bytes=1 << 20, blocked_s=0.25) for step in range(1, 9)),
        "steps": 4,
        "scale": 32768.0,
        "skipped": 1,
        "first": 2,
        "resumed_from": "run/checkpoints/step-00000002",
        "passed_over": (("run/checkpoints/step-00000003", "manifest.json cannot be read"),),
        "tokens_per_s": None,
        "held_out": None,
    },
}


def answer(folder: Path, **fields: object) -> train.Response:
    """The answer to two ranks that say so."""

    def runner(spec: TrainSpec, how: How, progress: Progress | None) -> Sequence[Trained]:
        del progress
        assert how.ranks == (0, 1)
        given: dict[str, Any] = {
            "digest": spec.digest,
            "how": "finished",
            "first": 0,
            "steps": 6,
            "tokens": 768,
            "loss": 2.5,
            "held_out": 2.75,
            "held_out_sequences": 5,
            "tokens_per_s": 1234.5,
            "skipped": 0,
            "scale": None,
            "resumed_from": "",
            "passed_over": (),
            "checkpoints": (Written(step=4, bytes=1 << 20, blocked_s=0.0123),),
            "share": share_of(spec.run),
            "ran": None,
            "lost": (),
            "fallen": (),
            "said": (),
            "meter": "resident",
            **fields,
        }
        return [Trained(rank=rank, memory_bytes=(rank + 1) << 28, **given) for rank in (0, 1)]

    precision = "fp8-tensorwise" if fields.get("ran") else "bf16"
    return train.run(Request(model=config(folder), precision=precision), runner=runner)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_screen_says_how_it_went(name: str, tmp_path: Path) -> None:
    found = answer(tmp_path, **VARIANTS[name])
    shown = render(document(machine.answer(msgspec.structs.replace(found, lines=LINES, observed_step=3))))
    check_golden(name, shown.replace(str(tmp_path), "FOLDER"))


def test_the_keys_are_frozen(tmp_path: Path) -> None:
    found = machine.answer(answer(tmp_path, **VARIANTS["train_fp8.txt"]))
    check_golden("train_keys.json", json.dumps({"train": _keys(found)}, indent=2) + "\n")
    assert list(found)[-1] == "run"


def _keys(value: object) -> object:
    """Names, nested; of a list what its first item has."""
    if isinstance(value, dict):
        return {key: _keys(inner) for key, inner in value.items() if key not in ("assumed", "notes")}
    return [_keys(value[0])] if isinstance(value, list) and value and isinstance(value[0], dict) else None


@pytest.mark.parametrize(("signal", "code"), [(None, 143), (15, 143), (2, 130)])
def test_a_run_that_was_asked_to_end_says_so_to_the_shell(tmp_path: Path, signal: int | None, code: int) -> None:
    found = answer(tmp_path, **VARIANTS["train_stopped.txt"])
    assert msgspec.structs.replace(found, signal=signal).exit_code == code


def test_memory_is_of_the_rank_that_held_most(tmp_path: Path) -> None:
    found = answer(tmp_path)
    assert found.memory_bytes == 2 << 28
    assert re.search(r"memory +512 MiB", render(document(machine.answer(found))))
