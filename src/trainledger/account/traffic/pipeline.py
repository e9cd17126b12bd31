"""Pipeline traffic of one optimizer step: boundary tensors, and the embedding that both ends hold."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainledger.account.traffic.collectives import Collective, collective
from trainledger.account.traffic.step import Step
from trainledger.arrays import ceil_div
from trainledger.dtypes import bytes_of


def pipeline_traffic(step: Step) -> Iterator[Collective]:
    """Boundary tensors: each chunk sends its output forward and its input gradient backward. [narayanan: 2.2]

    An inner stage sends m v forward; the last wraps m (v-1) of them to the first; gradients mirror that.
    """
    plans, pp = step.plans, step.plans.pp
    if not (pp > 1).any():
        return
    split = plans.sp_ranks
    size = bytes_of(ceil_div(step.tokens * step.model.hidden_size, split), step.dtype)[:, None]
    chunks, wraps = plans.vpp[:, None] * step.batches, (plans.vpp - 1)[:, None] * step.batches
    inner = step.occupied
    forward = inner * np.where(step.last == 1, wraps, chunks)
    backward = inner * np.where(step.first == 1, wraps, chunks)
    for what, sent, received in (("output", forward, backward), ("input gradient", backward, forward)):
        yield collective("send", "pp", what, step.dtype, pp, sent, size, "megatron-p2p")
        yield collective("recv", "pp", what, step.dtype, pp, received, size, "megatron-p2p")


def shared_weights(step: Step) -> Iterator[Collective]:
    """The gradient of an embedding that both ends of the pipeline hold is summed once per step. [megatron-finalize]"""
    table = step.own.table
    copies = table.slots == table.at.copy
    if not copies.any() or not table.trainable[copies].any():
        return
    grad = step.setting.dtype("grad")
    tensor = int(np.nonzero(copies)[0][0])
    elements = step.own.few.numel[:, tensor][step.own.kind][:, None]
    ends = np.where(step.plans.pp > 1, 2, 1)
    count = np.maximum(step.first, step.last)
    yield collective(
        "all_reduce",
        "embedding",
        "embedding gradient",
        grad,
        ends,
        count,
        bytes_of(elements, grad),
        "megatron-finalize",
    )
