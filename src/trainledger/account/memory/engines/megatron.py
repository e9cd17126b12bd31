"""What Megatron keeps for the whole run beside its states: dummy gradients of matrices, and workspaces of grouped ones.

The gradient of a matrix is added to Megatron's own buffer by the product that gives it, and autograd is handed a dummy
in its place: TransformerEngine makes one for each distinct shape and keeps it. [te-dummy] Products of several matrices
at once run on streams of their own, each with a workspace. [te: pytorch/cpp_extensions/gemm.py, get_cublas_workspace]
Nine measured peaks bear both out. [simumax-b200]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from trainledger.account.memory.engines.passing import Part, Passing
from trainledger.arrays import IntArray
from trainledger.dtypes import bytes_of
from trainledger.inventory.blocks.megatron.matrices import Matrix, matrices
from trainledger.inventory.tensors import BoolArray

GROUPED_STREAMS = 4
"""[te: common/util/multi_stream.cpp]"""
STREAM_WORKSPACE_BYTES = 32 * 2**20
"""From compute capability 9.0 on. [te: pytorch/cpp_extensions/gemm.py, get_cublas_workspace_size_bytes]"""


class GroupedWorkspaces(Passing):
    """The same at every place of the step: workspaces of routed experts' products."""

    holds = "workspaces of routed experts' products, one for each stream"
    cites = ("te",)

    def at(self, part: Part, slot: int, first: bool) -> IntArray:
        """Bytes [plans, rows]."""
        del part, slot, first
        return self.kept

    @cached_property
    def kept(self) -> IntArray:
        """[plans, rows]."""
        routed = self._holds([slot for slot, block in self.inventory.layers if block.moe is not None])
        return self.none + np.where(routed, GROUPED_STREAMS * STREAM_WORKSPACE_BYTES, 0)

    def _holds(self, slots: Sequence[int]) -> BoolArray:
        """[plans, rows]: which stages hold any of these slots."""
        held = np.zeros(self.own.pp_stage.shape, dtype=np.bool_)
        for slot in slots:
            held |= self.own.counts[:, :, slot] > 0
        return held


class DummyGradients(GroupedWorkspaces):
    """Those, and a tensor for each shape of a matrix."""

    holds = "a dummy gradient for each shape of a matrix, and workspaces of routed experts' products"
    cites = ("te-dummy",)

    @cached_property
    def kept(self) -> IntArray:
        """[plans, rows]."""
        return self._dummies() + super().kept

    def _dummies(self) -> IntArray:
        """One tensor for each distinct shape among the matrices that a stage holds."""
        dtype = self.inventory.setting.recipe.weight
        found, total = matrices(self.inventory, self.own.plans), self.none
        for index, matrix in enumerate(found):
            new = self._held(matrix)
            for before in found[:index]:
                same = (before.rows == matrix.rows) & (before.columns == matrix.columns)
                new = new & ~(same[:, None] & self._held(before))
            total = total + new * bytes_of(matrix.rows * matrix.columns, dtype)[:, None]
        return total

    def _held(self, matrix: Matrix) -> BoolArray:
        return self._holds(matrix.slots)
