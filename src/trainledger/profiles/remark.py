"""What an engine's profile has to say of some plans: how they are called there, and what is not as one may expect."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from trainledger.arrays import IntArray


class Remark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sentence, and the plans it is about: those of some zero_stages, with one pipeline stage or several.

    >>> remark = Remark(text="of ZeRO alone", zero=(2, 3), pp="1")
    >>> [remark.concerns(np.array(zero), np.array(pp)) for zero, pp in (([1, 3], [1, 1]), ([3], [2]), ([], []))]
    [True, False, False]
    """

    text: str
    zero: tuple[int, ...] = ()
    pp: Literal["", "1", ">1"] = ""

    def concerns(self, zero_stage: IntArray, pp: IntArray) -> bool:
        """Whether any of these plans, [plans] each, is one that it is about; without a condition it is about all."""
        if not self.zero and not self.pp:
            return True
        staged = np.isin(zero_stage, self.zero) if self.zero else np.ones(zero_stage.shape, dtype=bool)
        piped = {"": pp > 0, "1": pp == 1, ">1": pp > 1}[self.pp]
        return bool((staged & piped).any())
