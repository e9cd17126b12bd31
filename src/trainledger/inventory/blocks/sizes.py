"""Sizes that the tapes of all engines ask for: bytes of one rank's part of a micro-batch, arrays [plans]."""

from __future__ import annotations

import dataclasses
from functools import cached_property

import numpy as np

from trainledger.arrays import IntArray, ceil_div, ints, round_up
from trainledger.dtypes import bytes_of
from trainledger.facts.model import Attention, Moe
from trainledger.plans.plan import Plans
from trainledger.plans.setting import Setting


@dataclasses.dataclass(frozen=True)
class Sizes:
    """One micro-batch on one rank of each plan.

    tokens   what one rank computes on after context parallelism: its part of each sequence times the micro-batch
    """

    setting: Setting
    plans: Plans

    @cached_property
    def tokens(self) -> IntArray:
        """[plans]."""
        return self.plans.tokens(self.setting.workload.seq)

    @property
    def dtype(self) -> str:
        """Of activations."""
        return self.setting.recipe.activation

    @property
    def tp(self) -> IntArray:
        """[plans]: ranks that share a matrix."""
        return self.plans.tp

    @cached_property
    def sp_ranks(self) -> IntArray:
        """[plans]: ranks that cut the tokens between tensor-parallel regions."""
        return self.plans.sp_ranks

    @cached_property
    def cuts(self) -> bool:
        """Whether ranks share matrices."""
        return bool((self.plans.tp > 1).any())

    @cached_property
    def slices(self) -> bool:
        """Whether tokens are cut between tensor-parallel regions."""
        return bool((self.sp_ranks > 1).any())

    @cached_property
    def rings(self) -> bool:
        """Whether ranks share a sequence."""
        return bool((self.plans.cp > 1).any())

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.setting.model.hidden_size

    def wide(self, elements: IntArray | int, dtype: str = "") -> IntArray:
        """Bytes of `elements` for every token, in the dtype of activations unless another is named."""
        return bytes_of(self.tokens * elements, dtype or self.dtype)

    def cut(self, elements: IntArray | int, over: IntArray | int, dtype: str = "") -> IntArray:
        """The same, shared by `over` ranks."""
        return ceil_div(self.wide(elements, dtype), over)

    @cached_property
    def hidden(self) -> IntArray:
        """A whole hidden tensor."""
        return self.wide(self.hidden_size)

    @cached_property
    def residual(self) -> IntArray:
        """A hidden tensor between tensor-parallel regions: cut where sequence parallelism is on."""
        return self.cut(self.hidden_size, self.sp_ranks)

    def kv_heads(self, attention: Attention) -> IntArray:
        """KV heads of one rank: no fewer than one."""
        return np.maximum(ceil_div(attention.kv_heads, self.tp), 1)

    def heads(self, attention: Attention) -> IntArray:
        """Query heads of one rank."""
        return ints(ceil_div(attention.heads, self.tp))

    def vocabulary(self, *, cut: bool = True) -> IntArray:
        """Entries of the (cut) vocabulary, padded as the engine pads it."""
        setting = self.setting
        multiple = np.maximum(setting.profile.vocab_multiple * self.tp, 1)
        padded = round_up(setting.model.vocab_size, multiple)
        return ints(ceil_div(padded, self.tp) if cut else padded)

    def arriving(self, rows: IntArray, moe: Moe) -> IntArray:
        """[plans]: rows that the experts of one rank get where every rank sends `rows`, top_k for each token.

        As many with balanced routing; under `worst` those of all ranks, of a token as many as it can have there.
        """
        if self.setting.scenario.routing != "worst":
            return rows
        own = ceil_div(moe.experts, self.plans.ep)
        return rows // moe.top_k * np.minimum(own, moe.top_k) * self.plans.ep

    def logits(self, dtype: str, *, cut: bool = True) -> IntArray:
        """One value a token and entry of the (cut) vocabulary."""
        return bytes_of(self.tokens * self.vocabulary(cut=cut), dtype)
