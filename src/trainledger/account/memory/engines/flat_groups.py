"""What DeepSpeed's optimizers of 2022 pass through the card once a step, when the last backward is over.

Parameters are parts of one flat tensor, and its optimizers work on that as a whole or on a rank's part of it:

16-bit gradients   they are reduced in buckets, each flattened and then cast to the dtype of communication, and a tensor
                   that exceeds a bucket cast alone; the rank's part is searched for what is not finite in fp32, and its
                   norm is taken in fp64, tensor by tensor
                   [deepspeed-z1-2022: allreduce_bucket, _has_inf_or_nan, get_grad_norm_direct]
fp32 gradients     the flat tensor is a bucket by itself, whose cast to 16 bits is reduced
                   [deepspeed-bf16-2022: engine.py allreduce_bucket, bf16_optimizer.py get_grads_for_reduction]

Both gather weights afterwards in shards of a bucket or more, into one tensor that NCCL's all-gather of a list makes,
and the first steps once with zeros before any forward. What they ask for stays reserved: no block of a layer is as
large. Forty-nine readings of nvidia-smi bear it out. [bigscience-chronicles]
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from trainledger.account.memory.engines.passing import Passing
from trainledger.account.shares import pooled_elements
from trainledger.arrays import IntArray
from trainledger.dtypes import bytes_of

COMMUNICATION = "fp16"
"""The dtype in which 16-bit gradients are reduced, whatever theirs is."""
NEVER = 4
"""The zero_stage from which what is never divided is divided."""


class FlatGroups(Passing):
    """Nothing passes before the last backward is over; then one thing after the other does."""

    holds = "copies of flat gradients that the optimizer makes, the largest of them at once"
    cites = ("deepspeed-z1-2022", "deepspeed-bf16-2022")

    def end(self) -> IntArray:
        """The most of it."""
        return np.maximum.reduce([sum(together, self.none) for together in self.requests])

    @cached_property
    def requests(self) -> tuple[tuple[IntArray, ...], ...]:
        """[plans, rows] each: bytes asked for between the last backward and the step; those of a tuple together."""
        recipe = self.inventory.setting.recipe
        if self.accumulates:
            return ((bytes_of(self.whole, recipe.reduce),),)
        apart = self.largest > self.bucket
        bucket = bytes_of(np.minimum(self.bucket, self.whole - self.largest * apart), recipe.weight)
        cast = recipe.weight != COMMUNICATION
        alone = bytes_of(self.largest * apart, COMMUNICATION)
        own = bytes_of(np.minimum(self.largest, self.part), "fp32")
        return ((alone * cast,), (bucket, bucket * cast), (own,), (2 * own,))

    @cached_property
    def gathered(self) -> IntArray:
        """[plans, rows]: bytes of a shard of all ranks, after the step."""
        shards = np.maximum(self.whole // self.bucket, 1)
        return bytes_of(self.whole // shards, self.inventory.setting.recipe.gathered)

    @cached_property
    def first(self) -> IntArray:
        """[plans, rows]: bytes of the zeros that it steps with before any forward, where it has no fp32 gradients."""
        return bytes_of(self.part, "fp32") * (not self.accumulates)

    def tensors(self, row: int) -> list[int]:
        """Bytes of each parameter by itself, as the model of a single plan is made."""
        own, recipe = self.own, self.inventory.setting.recipe
        sizes = bytes_of(own.shapes.numel[0], recipe.weight).tolist()
        times = (own.held[0, row] * own.shapes.copies[0]).tolist()
        return [nbytes for nbytes, held in zip(sizes, times, strict=True) for _ in range(held)]

    @property
    def accumulates(self) -> bool:
        """Whether gradients are added up in fp32."""
        return self.inventory.setting.dtype("grad") != self.inventory.setting.recipe.weight

    @property
    def bucket(self) -> int:
        """Elements."""
        return self.inventory.setting.bucket_elements

    @cached_property
    def whole(self) -> IntArray:
        """[plans, rows]: elements of the flat tensor."""
        return pooled_elements(self.own, "flat", NEVER, self.own.table.trainable)[0]

    @cached_property
    def part(self) -> IntArray:
        """[plans, rows]: of a rank's part of it."""
        return pooled_elements(self.own, "flat", 1, self.own.table.trainable)[0]

    @cached_property
    def largest(self) -> IntArray:
        """[plans, rows]: of the largest tensor."""
        own = self.own
        return np.max(own.shapes.numel[:, None, :] * ((own.held > 0) & own.table.trainable), axis=2)
