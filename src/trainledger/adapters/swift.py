"""What `swift sft` is told, in the names of transformers' Trainer, with the defaults that ms-swift has instead of it.

[ms-swift: docs/source_en/Instruction/Command-line-parameters.md; swift/llm/ds_config, at 001320d0 and 35992c1c]
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trainledger.errors import BadInput

SIGNS = ("train_type", "sft_type", "tuner_type")
"""Arguments that ms-swift alone has, all of one meaning."""
PROGRAM = re.compile(r"\b(?:swift|megatron)\s+(?:sft|pt|rlhf)\b")
RANKS = re.compile(r"\b(NPROC_PER_NODE|NNODES)=[\"']?([^\s\"';]+)")
BATCH = 16
"""Samples of a step that its accumulation fills up to."""
DTYPES = ("bfloat16", "float16", "float32", "bf16", "fp16", "fp32")
_AUTO = {"enabled": "auto"}


def _stage(number: int, device: str) -> dict[str, Any]:
    sharded: dict[str, Any] = {"stage": number}
    if device == "cpu":
        sharded["offload_optimizer"] = {"device": device}
        if number == 3:
            sharded["offload_param"] = {"device": device}
    return {"zero_optimization": sharded, "bf16": dict(_AUTO), "fp16": dict(_AUTO)}


PRESETS: dict[str, dict[str, Any]] = {
    **{f"zero{number}": _stage(number, "none") for number in range(4)},
    **{f"default-zero{number}": _stage(number, "none") for number in (2, 3)},
    **{f"zero{number}_offload": _stage(number, "cpu") for number in (2, 3)},
}
"""Settings of DeepSpeed that it has by name."""


def is_swift(told: Mapping[str, Any]) -> bool:
    """Whether the arguments are ms-swift's."""
    return any(sign in told for sign in SIGNS)


def kind_of(told: Mapping[str, Any]) -> str:
    """What is trained: LoRA unless it is told otherwise."""
    return next((str(told[sign]) for sign in SIGNS if sign in told), "")


def precision_of(told: Mapping[str, Any]) -> tuple[str, str]:
    """The precision, and the argument that says it.

    The weights are loaded as --torch_dtype says, which is bf16 in most configs. AdamW trains them as they are: only
    DeepSpeed makes copies in fp32.

    >>> precision_of({"train_type": "full"}), precision_of({"train_type": "full", "deepspeed": "zero3"})
    (('bf16-pure', ''), ('bf16', ''))
    """
    name = next((key for key in ("torch_dtype", "dtype") if key in told), "")
    word = str(told.get(name, "bfloat16")).lower()
    if word not in ("auto", *DTYPES):
        raise BadInput(f"{name} is {word!r}: write {' or '.join(DTYPES)}")
    if word in ("float32", "fp32"):
        return "fp32", name
    if word in ("float16", "fp16"):
        return "fp16", name
    return ("bf16-pure" if kind_of(told) == "full" and not told.get("deepspeed") else "bf16"), name


def accumulation(mbs: int, ranks: int) -> int:
    """Micro-batches of a step where nothing says them.

    >>> accumulation(1, 8), accumulation(4, 8)
    (2, 1)
    """
    return max(-(-BATCH // (mbs * ranks)), 1)


def ranks_in(text: str) -> dict[str, str]:
    """The launcher's flags that its environment stands for.

    >>> ranks_in("CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 swift sft --train_type full")
    {'nproc_per_node': '2'}
    """
    if PROGRAM.search(text) is None:
        return {}
    return {name.lower(): number for name, number in RANKS.findall(text)}
