"""A plan is what may be searched: integer columns (Plans) under one set of categories (Scenario).

One plan is a Plans of length one; a search is the same with a million rows. Nothing here knows an engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import msgspec
import numpy as np

from trainledger.arrays import IntArray, ceil_div
from trainledger.errors import BadInput, UsageError

DEGREES = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp_replicate", "dp_shard")
DEGREE_LIMIT = 1 << 20
"""No axis of a job is longer than this: about ten times the largest cluster ever announced."""
TURNS = ("interleaved", "zero-bubble")
"""Schedules under which a rank takes turns among virtual stages; under the others it has one."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """The categorical half of a plan: scalars, one value for all rows.

    engine, framework_version   which profile accounts for the run; "" is the version that profile was read at
    precision                   a recipe of the profile, such as bf16 or fp8-delayed
    grad_dtype                  dtype gradients are kept and reduced in; "" is the engine's own default
    optimizer                   a name of profiles/optimizers.toml
    recompute                   none | full | selective: parts of a block | every-N: all of every N-th layer |
                                uniform-N: regions of N layers, each of which keeps the input of its first
    recompute_parts             which parts selective recomputes, in the engine's words; () is the engine's own choice
    recompute_layers            layers of each virtual stage that full recomputes, from its first; 0: all
    loss                        how the loss is computed; "" is the engine's own way
    schedule                    gpipe | 1f1b | interleaved | zb-h1 | zb-1p | zb-2p | zero-bubble (schedules/)
    attention                   flash | eager: whether the attention scores are ever materialised
    cp_comm                     ring | all_to_all | all_gather; "" is the engine's default
    loss_chunks                 parts of a chunked loss; 0 is the engine's default
    allocator                   default | expandable: how PyTorch's allocator grows; "" is as the launcher sets it
    compile                     on | off: torch.compile of blocks, and of the loss where the release has it; "" is the
                                engine's default
    dropout                     on | off: whether hidden states and scores are dropped out, and masks kept for it; ""
                                is as models of its kind are trained
    routing                     balanced | worst: how many tokens choose experts of one rank: an equal share, or all of
                                them; "" is balanced, with the worst as an upper bound
    frozen_dtype                dtype of weights that do not train; "" is the engine's own
    reduce_bucket               elements of a gradient bucket; 0 is the engine's default
    overlap_comm                on | off: DeepSpeed's, whose stages 1 and 2 have a second bucket for it; "" is off there
    offload                     what lives in host memory: optimizer, parameters, activations
    pp_layout                   layers of each virtual stage in order; () is the engine's own split
    """

    engine: str = "paper"
    framework_version: str = ""
    precision: str = "bf16"
    grad_dtype: str = ""
    optimizer: str = "adamw"
    recompute: str = "full"
    recompute_parts: tuple[str, ...] = ()
    recompute_layers: int = 0
    loss: str = ""
    schedule: str = "1f1b"
    attention: str = "flash"
    cp_comm: str = ""
    loss_chunks: int = 0
    allocator: str = ""
    routing: str = ""
    compile: str = ""
    dropout: str = ""
    frozen_dtype: str = ""
    reduce_bucket: int = 0
    overlap_comm: str = ""
    offload: tuple[str, ...] = ()
    pp_layout: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """Columns of equal length; row i is one plan. dp_replicate x dp_shard is the data-parallel degree.

    sp is 0 or 1 (Megatron sequence parallelism); etp is the tensor-parallel degree of routed experts;
    num_microbatches is the gradient-accumulation count (micro-batches per pipeline per optimizer step).
    """

    tp: IntArray
    sp: IntArray
    pp: IntArray
    vpp: IntArray
    cp: IntArray
    ep: IntArray
    etp: IntArray
    dp_replicate: IntArray
    dp_shard: IntArray
    zero_stage: IntArray
    mbs: IntArray
    num_microbatches: IntArray

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def dp(self) -> IntArray:
        """Data-parallel degree."""
        return self.dp_replicate * self.dp_shard

    @property
    def gpus(self) -> IntArray:
        """Ranks of the whole job."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def sp_ranks(self) -> IntArray:
        """Ranks over which sequence parallelism cuts tokens outside the tensor-parallel layers: tp, or 1 without it."""
        return np.where(self.sp == 1, self.tp, 1)

    def tokens(self, seq: int) -> IntArray:
        """Tokens of one micro-batch on one rank, which has 1 / cp of each sequence."""
        return ceil_div(seq, self.cp) * self.mbs

    def take(self, rows: IntArray | slice) -> Plans:
        """The named rows as Plans."""
        return Plans(**{name: column[rows] for name, column in self.columns()})

    def columns(self) -> Iterator[tuple[str, IntArray]]:
        """(name, column) pairs in declaration order."""
        return ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))

    def row(self, index: int) -> dict[str, int]:
        """One plan as plain integers."""
        return {name: int(column[index]) for name, column in self.columns()}

    def by_zero_stage(self) -> tuple[list[Plans], IntArray]:
        """The plans of each zero_stage, and where each plan stands when those are put one after another."""
        low = int(self.zero_stage[0])
        if len(self) == 1 or (self.zero_stage == low).all():
            return [self], np.arange(len(self))
        order = np.argsort(self.zero_stage, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(self))
        ends = np.flatnonzero(np.diff(self.zero_stage[order])) + 1
        return [self.take(rows) for rows in np.split(order, ends)], place

    def distinct(self, names: tuple[str, ...]) -> tuple[Plans, IntArray]:
        """One representative row per distinct combination of the named columns, and each row's representative."""
        if len(self) == 1:
            return self, np.zeros(1, dtype=np.int64)
        key = np.zeros(len(self), dtype=np.int64)
        size = 1
        for name in names:
            codes, span = _codes(getattr(self, name))
            if size * span >= 1 << 62:
                key, size = _codes(np.unique(key, return_inverse=True)[1])
            key = key * span + codes
            size *= span
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        return self.take(first), inverse


def _codes(column: IntArray) -> tuple[IntArray, int]:
    """The column from zero, and how many values it could take."""
    low = int(column.min())
    return column - low, int(column.max()) - low + 1


def make_plans(columns: Mapping[str, object]) -> Plans:
    """Plans from scalars and arrays, broadcast together; a missing column is 1 (sp, zero_stage: 0; etp: as tp).

    Raises BadInput for a degree below one or above DEGREE_LIMIT.

    >>> plans = make_plans({"tp": [1, 2], "dp_shard": 8})
    >>> plans.gpus.tolist(), plans.etp.tolist()
    ([8, 16], [1, 2])
    """
    defaults = {"sp": 0, "zero_stage": 0, "etp": columns.get("tp", 1)}
    names = [field.name for field in dataclasses.fields(Plans)]
    unknown = set(columns) - set(names)
    if unknown:
        raise AssertionError(f"not columns of Plans: {sorted(unknown)}")
    arrays = [np.atleast_1d(np.asarray(columns.get(n, defaults.get(n, 1)), dtype=np.int64)) for n in names]
    plans = Plans(**dict(zip(names, map(np.ascontiguousarray, np.broadcast_arrays(*arrays)), strict=True)))
    for name, column in plans.columns():
        least, most = {"sp": (0, 1), "zero_stage": (0, 3)}.get(name, (1, DEGREE_LIMIT))
        low, high = int(column.min()), int(column.max())
        if low < least or high > most:
            wrong = low if low < least else high
            flag = name.replace("_stage", "").replace("_", "-")
            raise BadInput(f"--{flag} is {wrong}: it must lie between {least} and {most}")
    return plans


def num_microbatches(gbs: int | None, share: IntArray) -> IntArray:
    """Micro-batches of one pipeline per optimizer step: gbs over `share` (mbs x dp); 1 without a global batch.

    What does not divide is left to the rule gbs-divisible.

    >>> num_microbatches(512, np.array([8, 24, 1024])).tolist()
    [64, 21, 1]
    """
    return np.ones_like(share) if gbs is None else np.maximum(gbs // share, 1)


def data_parallel_degree(gpus: int, tp: int, pp: int, cp: int) -> int:
    """The data-parallel degree left over by the other axes, or the error that names the remainder.

    >>> data_parallel_degree(64, 8, 2, 1)
    4
    """
    model_parallel = tp * pp * cp
    if gpus < 1:
        raise BadInput(f"--gpus is {gpus}: it must be at least 1")
    if model_parallel < 1:
        raise BadInput(f"tp={tp}, pp={pp}, cp={cp}: every degree must be at least 1")
    if gpus % model_parallel:
        below = gpus // model_parallel * model_parallel
        near = f"{below} or {below + model_parallel}" if below else str(model_parallel)
        raise UsageError(
            f"[world-divisible] --gpus {gpus} is not a multiple of tp x pp x cp = {tp} x {pp} x {cp} = "
            f"{model_parallel} (remainder {gpus % model_parallel}); use {near} GPUs, or change a degree"
        )
    return gpus // model_parallel
