"""Tensor-parallel traffic of one optimizer step: what the regions of a block, its ends and the loss exchange."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainledger.account.traffic.collectives import Collective, collective
from trainledger.account.traffic.step import Step
from trainledger.dtypes import bytes_of
from trainledger.facts.model import Block


def regions(block: Block) -> int:
    """Column-parallel, row-parallel pairs of a block: one around attention or SSM, one around a dense or shared MLP.

    A parallel block has one of both together. [megatron-tp]
    """
    mixer = int(block.attention is not None or block.ssm is not None)
    shared = block.moe is not None and block.moe.shared_intermediate > 0
    mlp = int(block.mlp is not None or shared)
    return min(mixer + mlp, 1) if block.parallel else mixer + mlp


def tensor_traffic(step: Step) -> Iterator[Collective]:
    """Per region and micro-batch. [megatron-tp, torchtitan-tp]

    without sp   1 all-reduce forward, 1 backward
    with sp      all-gather + reduce-scatter forward; backward the same, and Megatron gathers the saved input again
    Full recompute repeats the forward; where the checkpoint stops early it does not repeat a block's last reduction.
    """
    plans = step.plans
    tp = plans.tp
    if not (tp > 1).any():
        return
    sp = (plans.sp == 1)[:, None].astype(np.int64)
    size = step.hidden_bytes()
    pairs = step.per_block([regions(block) for block in step.layers])
    ending = step.per_block([int(regions(block) > 0) for block in step.layers])
    skipped = step.recompute * (0 if step.rules.recompute_reruns_last else 1) * ending
    forward = pairs * (1 + step.recompute)
    backward_gathers = 2 if step.rules.tp_style == "megatron" else 1
    ends_reduce = step.first + step.last * (1 - sp)
    all_reduces = (forward - skipped + pairs + ends_reduce) * (1 - sp)
    gathers = (forward + backward_gathers * pairs + step.first + (backward_gathers) * step.last) * sp
    scatters = (forward - skipped + pairs + step.first + step.last) * sp
    batches = step.batches
    yield collective("all_reduce", "tp", "hidden", step.dtype, tp, all_reduces * batches, size, "megatron-tp")
    yield collective("all_gather", "tp", "hidden", step.dtype, tp, gathers * batches, size, "megatron-tp")
    yield collective("reduce_scatter", "tp", "hidden", step.dtype, tp, scatters * batches, size, "megatron-tp")
    losses = step.rules.loss_all_reduces * step.losses * batches
    per_loss = bytes_of(step.tokens, "fp32")[:, None]
    yield collective("all_reduce", "tp", "loss statistics", "fp32", tp, losses, per_loss, "megatron-loss")
    if step.rules.reduces_norms:
        grad = step.setting.dtype("grad")
        whole = step.own.table.trainable & (step.own.table.tp_dim == -1) & ~step.own.table.expert
        elements = step.own.total_few(step.own.few.numel * step.own.few.copies * whole)
        marked = (elements > 0) * sp
        yield collective(
            "all_reduce", "tp", "gradients of norms", grad, tp, marked, bytes_of(elements, grad), "megatron-finalize"
        )
