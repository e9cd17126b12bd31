"""What a checkpoint of this package's own program takes on disk: every element of every tensor once.

The program keeps weights in fp32 whatever it computes in, and a checkpoint has moments decoded to fp32, so that any
recipe and any layout can go on from it. What depends on the layout is not counted: a kilobyte or two of headers that
PyTorch writes around each part of a tensor, its index, and scales of 8-bit moments. [torch-checkpoint]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import numpy as np

from trainledger.account.memory.outside.line import Outside
from trainledger.arrays import ints
from trainledger.dtypes import bytes_of
from trainledger.facts.model import Model, Tensor
from trainledger.inventory.inventory import Inventory
from trainledger.lines import CHECKPOINT
from trainledger.plans.setting import Setting
from trainledger.runtime.spec import Optimizer, Precision

PROGRAM = "pytorch"
"""The profile of this package's own program."""


def on_disk(inventory: Inventory) -> Iterator[Outside]:
    """The line of a run that the program can train and save; nothing else has such checkpoints."""
    setting = inventory.setting
    if not _saves(setting):
        return
    sizes = [tensor.numel * tensor.copies for tensor in _tensors(setting.model)]
    kept = len(setting.optimizer.moments)
    counted = setting.scenario.optimizer in setting.profile.counts_steps
    weights, moments, steps = (
        int(bytes_of(ints(elements), "fp32").sum())
        for elements in (sizes, [size for size in sizes for _ in range(kept)], [1] * len(sizes) * counted)
    )
    parts = [f"weights in fp32 {weights} B", f"{kept} moments in fp32 {moments} B", f"step counts {steps} B"]
    yield Outside(
        what=CHECKPOINT,
        when="save",
        place="disk",
        per="job",
        amount=int(np.sum([weights, moments, steps])),
        basis="exact",
        formula=f"{' + '.join(parts)}; headers, the index and scales of 8-bit moments come on top",
        cites=("torch-checkpoint",),
    )


def _saves(setting: Setting) -> bool:
    """Whether the program trains this: all of a model whose tensors are known, in a recipe that it has."""
    scenario, workload, model = setting.scenario, setting.workload, setting.model
    return (
        setting.profile.name == PROGRAM
        and scenario.optimizer in get_args(Optimizer)
        and scenario.precision in get_args(Precision)
        and not (workload.lora_rank or workload.frozen_copy or workload.ema or workload.mtp)
        and not model.params_only
    )


def _tensors(model: Model) -> Iterator[Tensor]:
    """Every parameter of the program; routed experts of a block are stacked in one."""
    yield from (*model.embedding, *model.final)
    for block in model.blocks:
        for _ in block.layers:
            yield from block.tensors
