"""What a setting holds before any plan is chosen, and the stages of each pipeline, looked up once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TypeVar, cast

import numpy as np

from trainledger.arrays import IntArray
from trainledger.facts.model import Block
from trainledger.facts.presumed import presumed
from trainledger.facts.semantics import Semantics
from trainledger.inventory.buffers import Buffer, buffers
from trainledger.inventory.slots import slots_of
from trainledger.inventory.stages import StageTable, stage_table
from trainledger.inventory.tensors import TensorTable, tensor_table
from trainledger.plans.plan import Plans
from trainledger.plans.setting import Setting
from trainledger.schedules import find_schedule

Found = TypeVar("Found")

KEPT = 64
"""How many answers about single plans are remembered."""


class Inventory:
    """The tensors, buffers and stages of one Setting."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._stages: dict[tuple[int, int], StageTable] = {}
        self._known: dict[tuple[str, bytes], object] = {}

    def once(self, what: str, plans: Plans, make: Callable[[], Found]) -> Found:
        """What follows from a single plan and is asked for again by everything that is said of it; else made anew."""
        if len(plans) != 1:
            return make()
        key = what, b"".join([column.tobytes() for _, column in plans.columns()])
        if key not in self._known:
            if len(self._known) >= KEPT:
                self._known.clear()
            self._known[key] = make()
        return cast("Found", self._known[key])

    @cached_property
    def table(self) -> TensorTable:
        """Distinct tensors."""
        return tensor_table(self.setting.model, self.setting.workload)

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """What the engine keeps of them."""
        return buffers(self.setting, self.table)

    @cached_property
    def presumed(self) -> Semantics:
        """The rules of the forward pass, as the model tells them."""
        return presumed(self.setting.model)

    @cached_property
    def layers(self) -> tuple[tuple[int, Block], ...]:
        """(slot, block) of every kind of layer that trains, a multi-token-prediction depth last."""
        model = self.setting.model
        kinds = list(enumerate(model.blocks, start=1))
        if model.mtp is not None and self.setting.workload.mtp:
            kinds.append((slots_of(model).mtp, model.mtp))
        return tuple(kinds)

    def losses(self, counts: IntArray) -> IntArray:
        """[plans, rows]: output layers and losses: one on the last stage, and one a multi-token-prediction depth."""
        at = slots_of(self.setting.model)
        return counts[:, :, at.final] + counts[:, :, at.mtp]

    def stages(self, pp: int, vpp: int) -> StageTable:
        """The distinct pipeline stages of one (pp, vpp)."""
        key = (pp, vpp)
        if key not in self._stages:
            setting = self.setting
            self._stages[key] = stage_table(
                setting.model,
                pp,
                vpp,
                setting.profile.split,
                setting.scenario.pp_layout,
                mtp=setting.workload.mtp,
                every=not find_schedule(setting.scenario.schedule).front_heavy,
                first=setting.scenario.recompute_layers,
            )
        return self._stages[key]

    def stage_order(self, plans: Plans, depth: int = 0) -> tuple[IntArray, IntArray]:
        """[plans, rows, kinds, kinds]: layers of each kind before a stage's first, and after its last, of each kind.

        In the order of `layers`: a multi-token-prediction depth comes after all others. depth: rows at least.
        """
        kinds = len(self.layers)
        pairs, inverse = plans.distinct(("pp", "vpp"))
        tables = [self.stages(int(pp), int(vpp)) for pp, vpp in zip(pairs.pp, pairs.vpp, strict=True)]
        depth = max(depth, *(len(table.pp_stage) for table in tables))
        earlier, later = np.zeros((2, len(tables), depth, kinds, kinds), dtype=np.int64)
        blocks = len(self.setting.model.blocks)
        for index, table in enumerate(tables):
            rows = len(table.pp_stage)
            earlier[index, :rows, :blocks, :blocks] = table.earlier
            later[index, :rows, :blocks, :blocks] = table.later
            if kinds > blocks:
                earlier[index, :rows, blocks, :blocks] = table.counts[:, 1 : blocks + 1]
                later[index, :rows, :blocks, blocks] = table.counts[:, self.table.at.mtp, np.newaxis]
        return earlier[inverse], later[inverse]

    def recomputed(self, plans: Plans, counts: IntArray | None = None) -> IntArray:
        """[plans, rows, kinds]: layers of each kind that run forward again, in the order of `layers`.

        A multi-token-prediction depth is none of the first so many of a chunk, and runs again all the same.
        counts: [plans, rows, slots] where stages other than the distinct ones are asked about, a rank's own for one.
        """
        setting = self.setting
        held = self.stage_counts(plans)[0] if counts is None else counts
        layers = held[:, :, [slot for slot, _ in self.layers]]
        if setting.recomputed_every > 1:
            return layers // setting.recomputed_every
        if not setting.recomputes_all:
            return np.zeros_like(layers)
        if setting.scenario.recompute_layers:
            pairs, inverse = plans.distinct(("pp", "vpp"))
            chosen, blocks = layers.copy(), len(setting.model.blocks)
            tables = [self.stages(int(pp), int(vpp)) for pp, vpp in zip(pairs.pp, pairs.vpp, strict=True)]
            for index, table in enumerate(tables):
                chosen[inverse == index, : len(table.first), :blocks] = table.first
            return chosen
        return layers

    def stage_counts(self, plans: Plans) -> tuple[IntArray, IntArray]:
        """([plans, rows, slots] how often a stage holds each slot, [plans, rows] its pp_stage), zero-padded.

        A padded row holds nothing and repeats pp_stage 0, so it never binds.
        """
        if len(plans) == 1:
            only = self.stages(int(plans.pp[0]), int(plans.vpp[0]))
            return only.counts[np.newaxis], only.pp_stage[np.newaxis]
        pairs, inverse = plans.distinct(("pp", "vpp"))
        tables = [self.stages(int(pp), int(vpp)) for pp, vpp in zip(pairs.pp, pairs.vpp, strict=True)]
        depth = max(len(table.pp_stage) for table in tables)
        counts = np.zeros((len(tables), depth, self.table.at.count), dtype=np.int64)
        pp_stage = np.zeros((len(tables), depth), dtype=np.int64)
        for index, table in enumerate(tables):
            counts[index, : len(table.pp_stage)] = table.counts
            pp_stage[index, : len(table.pp_stage)] = table.pp_stage
        return counts[inverse], pp_stage[inverse]
