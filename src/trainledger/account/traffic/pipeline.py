"""Pipeline traffic of one optimizer step: boundary tensors, and the embedding that both ends hold."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainledger.account.shares import tensor_elements
from trainledger.account.traffic.collectives import Collective, collective
from trainledger.account.traffic.step import Step
from trainledger.arrays import IntArray, ceil_div
from trainledger.dtypes import bytes_of


def pipeline_traffic(step: Step) -> Iterator[Collective]:
    """Boundary tensors: each chunk sends its output forward and its input gradient backward. [narayanan: 2.2]

    An inner stage sends m v forward; the last wraps m (v-1) of them to the first; gradients mirror that. The schedule
    decides when, not how often; under sequence parallelism a rank sends its part of the tokens. [torch-pipelining]
    """
    plans, pp = step.plans, step.plans.pp
    if not (pp > 1).any():
        return
    split = plans.sp_ranks
    size = bytes_of(ceil_div(step.tokens * step.model.hidden_size, split), step.dtype)[:, None]
    chunks, wraps = plans.vpp[:, None] * step.batches, (plans.vpp - 1)[:, None] * step.batches
    stages = _stages(step)
    forward = stages * np.where(step.last == 1, wraps, chunks)
    backward = stages * np.where(step.first == 1, wraps, chunks)
    cite = "torch-pipelining" if step.rules.style == "ddp_fsdp2" else "megatron-p2p"
    for what, sent, received in (("output", forward, backward), ("input gradient", backward, forward)):
        yield collective("send", "pp", what, step.dtype, pp, sent, size, cite)
        yield collective("recv", "pp", what, step.dtype, pp, received, size, cite)


def _stages(step: Step) -> IntArray:
    """[plans, rows]: 1 where a row is a stage, though it be one without layers; padding repeats the first."""
    found = step.own.pp_stage > 0
    found[:, 0] = True
    return found.astype(np.int64)


def shared_weights(step: Step) -> Iterator[Collective]:
    """The gradient of an embedding that both ends of the pipeline hold is summed once per step. [megatron-finalize]

    PyTorch's program sums what is left after the data-parallel reduction: from zero_stage 1 on each rank its shard.
    """
    table = step.own.table
    copies = table.slots == table.at.copy
    if not copies.any() or not table.trainable[copies].any():
        return
    grad = step.setting.dtype("grad")
    tensor = int(np.nonzero(copies)[0][0])
    if step.rules.shards_embedding:
        elements = tensor_elements(step.own, "dim0", 1)[0][:, tensor][:, None]
    else:
        elements = step.own.few.numel[:, tensor][step.own.kind][:, None]
    ends = np.where(step.plans.pp > 1, 2, 1)
    count = np.maximum(step.first, step.last)
    what, size = "embedding gradient", bytes_of(elements, grad)
    yield collective("all_reduce", "embedding", what, grad, ends, count, size, "megatron-finalize")
