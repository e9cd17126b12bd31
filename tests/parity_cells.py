"""What parity is proved of: a few cells that are quick, a matrix of models and layouts, and legal plans at random."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from parity import MODELS, RATES, RULES, Cell, setting_of
from trainledger.plans.plan import make_plans
from trainledger.rules import passing

MOST_RANKS = 8
"""Of a plan drawn at random."""
DEEP = 4
"""Layers of a model whose plan is drawn at random."""
DRAWN = 4096
"""Rows from which the legal ones are taken; about one in twenty is."""

LATE = {"recompute": "full", "early_stop": False}
EARLY = {"recompute": "full", "early_stop": True}

QUICK: tuple[Cell, ...] = (
    Cell("llama", {"dp_shard": 2, "num_microbatches": 2}),
    Cell("qwen-tied", {"dp_shard": 2, "zero_stage": 2, "num_microbatches": 2}),
    Cell("mixtral", {"dp_shard": 2, "ep": 2, "zero_stage": 3, "num_microbatches": 2}, EARLY, uneven=True),
    Cell("llama", {"cp": 2, "zero_stage": 1, "mbs": 2, "num_microbatches": 2}, {"cp_comm": "all_gather"}),
    Cell("latent", {"tp": 2, "sp": 1, "mbs": 2, "num_microbatches": 2}, LATE),
    Cell("qwen-tied", {"pp": 2, "num_microbatches": 4}),
    Cell("latent", {"dp_shard": 3, "zero_stage": 3, "num_microbatches": 2}),
    Cell("llama", {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 1, "mbs": 1}),
    Cell("qwen", {"tp": 2, "dp_shard": 2, "zero_stage": 3, "num_microbatches": 2}),
    Cell("mixtral", {"dp_shard": 4, "ep": 2, "zero_stage": 2}, uneven=True),
    Cell(
        "qwen-tied",
        {"pp": 2, "vpp": 2, "dp_shard": 2, "zero_stage": 2, "num_microbatches": 2},
        {"schedule": "interleaved"},
        layers=4,
    ),
    Cell("llama", {"cp": 2, "tp": 2, "sp": 1, "zero_stage": 3, "mbs": 2, "num_microbatches": 2}),
)
"""Every axis and stage once, four or six sequences a step, so that one run of a single process serves several."""


def _data() -> Iterator[Cell]:
    """Data parallelism alone: stages, micro-batches, ranks, replicas of shards, two runs of each block."""
    for ranks in (2, 3, 4):
        for zero_stage in range(4):
            for batches in (1, 2):
                yield Cell("", {"dp_shard": ranks, "zero_stage": zero_stage, "num_microbatches": batches})
    for zero_stage in (1, 2, 3):
        yield Cell("", {"dp_replicate": 2, "dp_shard": 2, "zero_stage": zero_stage, "num_microbatches": 2})
        yield Cell("", {"dp_replicate": 2, "zero_stage": zero_stage, "num_microbatches": 2})
    for zero_stage in (0, 3):
        for again in (EARLY, LATE):
            yield Cell("", {"dp_shard": 2, "zero_stage": zero_stage, "num_microbatches": 2}, again)


def _tensor() -> Iterator[Cell]:
    """Matrices cut, alone and under data parallelism, and with each sequence cut as well."""
    for sp in (0, 1):
        yield Cell("", {"tp": 2, "sp": sp, "num_microbatches": 2})
        yield Cell("", {"tp": 2, "sp": sp, "num_microbatches": 2}, EARLY)
        yield Cell("", {"tp": 2, "sp": sp, "num_microbatches": 2}, LATE)
        yield Cell("", {"tp": 2, "sp": sp, "num_microbatches": 2}, {"loss_parallel": False})
        yield Cell("", {"tp": 2, "sp": sp, "zero_stage": 3})
        for zero_stage in range(4):
            yield Cell("", {"tp": 2, "sp": sp, "dp_shard": 2, "zero_stage": zero_stage, "num_microbatches": 2})
    yield Cell("", {"tp": 2, "sp": 1, "dp_replicate": 2, "dp_shard": 2, "zero_stage": 3, "num_microbatches": 2})


def _context() -> Iterator[Cell]:
    for cp_comm in ("ring", "all_gather"):
        yield Cell("", {"cp": 2, "num_microbatches": 2}, {"cp_comm": cp_comm})
        yield Cell("", {"cp": 2, "zero_stage": 3, "num_microbatches": 2}, {"cp_comm": cp_comm})
    yield Cell("", {"cp": 2}, EARLY)
    yield Cell("", {"cp": 2, "dp_shard": 2, "zero_stage": 2, "num_microbatches": 2})
    yield Cell("", {"cp": 4, "zero_stage": 1, "num_microbatches": 2})
    for sp in (0, 1):
        yield Cell("", {"cp": 2, "tp": 2, "sp": sp, "zero_stage": 3, "num_microbatches": 2})
    yield Cell("", {"cp": 2, "tp": 2, "sp": 1, "dp_shard": 2, "zero_stage": 3, "num_microbatches": 2})


def _pipeline() -> Iterator[Cell]:
    """Stages under every schedule, alone and over data, tensor and context parallelism."""
    for schedule, vpp in (("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble", 2)):
        fields, layers = {"schedule": schedule}, 2 * vpp
        yield Cell("", {"pp": 2, "vpp": vpp, "num_microbatches": 4}, fields, layers)
        if schedule != "zero-bubble":
            yield Cell("", {"pp": 2, "vpp": vpp, "num_microbatches": 2}, {**fields, **EARLY}, layers)
        yield Cell("", {"pp": 2, "vpp": vpp, "tp": 2, "sp": 1, "num_microbatches": 2}, fields, layers)
        for zero_stage in range(4):
            plan = {"pp": 2, "vpp": vpp, "dp_shard": 2, "zero_stage": zero_stage, "num_microbatches": 2}
            yield Cell("", plan, fields, layers)
        plan = {"pp": 2, "vpp": vpp, "tp": 2, "dp_shard": 2, "zero_stage": 3, "num_microbatches": 2}
        yield Cell("", plan, fields, layers)
    yield Cell("", {"pp": 2, "cp": 2, "zero_stage": 3, "num_microbatches": 2})
    yield Cell("", {"pp": 4, "num_microbatches": 4}, layers=5)
    yield Cell("", {"pp": 2, "num_microbatches": 2}, {"pp_layout": (1, 3)}, layers=4)


def _experts() -> Iterator[Cell]:
    """Experts owned by ranks, which average them over fewer ranks than the rest, and experts without a token."""
    for zero_stage in range(4):
        yield Cell("", {"dp_shard": 2, "ep": 2, "zero_stage": zero_stage, "num_microbatches": 2})
        yield Cell("", {"dp_shard": 4, "ep": 2, "zero_stage": zero_stage, "num_microbatches": 2})
        yield Cell("", {"dp_shard": 4, "ep": 2, "zero_stage": zero_stage, "num_microbatches": 2}, uneven=True)
        yield Cell("", {"pp": 2, "dp_shard": 4, "ep": 2, "zero_stage": zero_stage, "num_microbatches": 2})
    for zero_stage in (1, 2, 3):
        yield Cell("", {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "zero_stage": zero_stage, "num_microbatches": 2})
        yield Cell("", {"dp_replicate": 2, "dp_shard": 4, "ep": 2, "zero_stage": zero_stage, "num_microbatches": 2})
    for zero_stage in (0, 3):
        yield Cell("", {"dp_shard": 4, "ep": 4, "zero_stage": zero_stage, "num_microbatches": 2}, uneven=True)
        yield Cell("", {"cp": 2, "dp_shard": 2, "ep": 2, "zero_stage": zero_stage, "num_microbatches": 2})
        yield Cell("", {"cp": 2, "dp_shard": 2, "ep": 4, "zero_stage": zero_stage, "num_microbatches": 2})
        yield Cell("", {"dp_shard": 8, "zero_stage": zero_stage}, uneven=True)
    for again in (EARLY, LATE):
        yield Cell("", {"dp_shard": 2, "ep": 2, "zero_stage": 3, "num_microbatches": 2}, again, uneven=True)
    yield Cell("", {"dp_shard": 2, "zero_stage": 3}, uneven=True)
    yield Cell("", {"tp": 2, "sp": 1, "num_microbatches": 2}, uneven=True)


def _optimizers() -> Iterator[Cell]:
    """What the others do not run: the fused AdamW, and momentum."""
    for plan in ({"dp_shard": 2, "zero_stage": 3}, {"tp": 2, "sp": 1}, {"pp": 2, "num_microbatches": 2}):
        yield Cell("", plan, {"optimizer": "adamw-fused"})
        yield Cell("", plan, {"optimizer": "sgd-momentum"})


def matrix() -> Iterator[Cell]:
    """Every layout with every model that has what it needs."""
    for model in MODELS:
        for group in (_data, _tensor, _context, _pipeline, _optimizers, *((_experts,) if _routed(model) else ())):
            yield from (cell._replace(model=model) for cell in group())


def _routed(model: str) -> bool:
    return any(block.moe for block in setting_of(model, DEEP, {}).model.blocks)


def random_cell(seed: int) -> Cell:
    """A legal plan with whatever else a run can be told, both drawn from `seed`."""
    chosen, rows = random.Random(seed), np.random.default_rng(seed)  # noqa: S311  # the same in every run
    while True:
        model, fields = chosen.choice(list(MODELS)), _random_fields(chosen)
        columns = {name: rows.choice(values, DRAWN) for name, values in _COLUMNS.items()}
        plans = make_plans(columns)
        good = passing(RULES, setting_of(model, DEEP, fields), plans)
        good &= (plans.gpus > 1) & (plans.gpus <= MOST_RANKS)
        if good.any():
            row = plans.row(int(rows.choice(np.flatnonzero(good))))
            return Cell(model, _told(row), fields, DEEP, uneven=_routed(model) and chosen.random() < 0.5)


_COLUMNS: Mapping[str, tuple[int, ...]] = {
    "tp": (1, 2, 4),
    "sp": (0, 1),
    "pp": (1, 2, 4),
    "vpp": (1, 2),
    "cp": (1, 2, 4),
    "ep": (1, 2, 4),
    "dp_replicate": (1, 2),
    "dp_shard": (1, 2, 3, 4),
    "zero_stage": (0, 1, 2, 3),
    "mbs": (1, 2),
    "num_microbatches": (1, 2, 3, 4),
}


def _random_fields(chosen: random.Random) -> dict[str, Any]:
    return {
        "optimizer": chosen.choice(list(RATES)),
        "schedule": chosen.choice(("1f1b", "interleaved", "zero-bubble")),
        "cp_comm": chosen.choice(("ring", "all_gather")),
        **chosen.choice(({}, EARLY, LATE)),
        "loss_parallel": chosen.choice((True, False)),
        "clip_norm": chosen.choice((0.0, 0.3, 1.0)),
        "weight_decay": chosen.choice((0.0, 0.1)),
        "seed": chosen.randrange(1000),
    }


def _told(row: dict[str, int]) -> dict[str, int]:
    """The columns that are not what they are without being named; etp follows tp."""
    unset = {name: int(name not in {"sp", "zero_stage"}) for name in row if name != "etp"}
    return {name: row[name] for name, value in unset.items() if row[name] != value}
